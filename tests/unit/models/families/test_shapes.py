"""Published sizes make the models that carry their names."""

import pytest

from qdqbench.quantize.models.families.known import MODEL_SHAPES

# millions of parameters, with a classifier of two labels, as their authors and transformers' documents say
PARAMETERS = {
    "bert-base": 109.5, "bert-large": 335.1, "minilm": 22.7, "roberta-base": 124.6, "xlm-roberta-base": 278.0,
    "camembert-base": 110.6, "distilbert-base": 67.0, "electra-base": 109.5, "mpnet-base": 109.5,
    "albert-base": 11.7, "deberta-v3-base": 184.4, "modernbert-base": 149.6,
}  # fmt: skip


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_a_size_has_the_published_number_of_parameters(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.device("meta"):
        config = AutoConfig.for_model(**MODEL_SHAPES[name], num_labels=2)
        model = AutoModelForSequenceClassification.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert counted == pytest.approx(PARAMETERS[name], rel=0.01)
