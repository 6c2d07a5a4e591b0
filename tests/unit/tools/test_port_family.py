"""tools/port_family.py: a BERT in the layout of other families."""

import dataclasses

import pytest
import torch
from tools import port_family
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from qdqbench.quantize.models.load import load_encoder
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION

from ...support.families import SIZES, write_model
from ...support.tiny_bert import VOCABULARY
from ...support.tiny_embedder import write_sentence_folder

TEXTS = [" ".join(VOCABULARY[5:9]), " ".join(VOCABULARY[6:20])]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Folder of a tiny classifier with wide random weights."""
    return write_model(tmp_path_factory.mktemp("bert"), "bert", labels=3)


def answers(folder, made):
    """Hidden states behind the last layer where there is a token, and logits if any."""
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = made.from_pretrained(folder).eval()(**batch, output_hidden_states=True)
    return found.hidden_states[-1][batch["attention_mask"].bool()], found.get("logits")


@pytest.mark.parametrize("family", port_family.LAYOUTS)
def test_a_copy_is_of_its_family_and_computes_what_the_bert_does(bert, tmp_path, family):
    port_family.port(bert, family, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == family
    load_encoder(str(tmp_path), CLASSIFICATION, num_labels=3)
    (before, logits), (after, made) = (
        answers(folder, AutoModelForSequenceClassification) for folder in (bert, tmp_path)
    )
    assert made.shape == logits.shape
    same = (torch.allclose(before, after, atol=1e-4), torch.allclose(logits, made, atol=1e-4))
    names = port_family.LAYOUTS[family].same
    assert same == (port_family.HIDDEN in names, port_family.LOGITS in names)
    assert logits.std() > 0.1


def test_every_model_type_that_is_supported_has_a_layout():
    assert {*port_family.LAYOUTS} == {*SIZES} - {"bert"}


def test_a_folder_of_sentence_transformers_stays_one(tmp_path):
    source = write_sentence_folder(tmp_path / "bert")
    port_family.port(source, "xlm-roberta", tmp_path / "copy")
    (before, _), (after, _) = (answers(folder, AutoModel) for folder in (source, tmp_path / "copy"))
    torch.testing.assert_close(before, after, atol=1e-4, rtol=0)
    assert {"modules.json", "1_Pooling"} <= {path.name for path in (tmp_path / "copy").iterdir()}


def test_a_copy_that_differs_is_refused(bert, tmp_path, monkeypatch):
    headless = dataclasses.replace(port_family.ROBERTA, names={})
    monkeypatch.setitem(port_family.LAYOUTS, "roberta", headless)
    with pytest.raises(SystemExit, match="logits are not those of"):
        port_family.port(bert, "roberta", tmp_path)
