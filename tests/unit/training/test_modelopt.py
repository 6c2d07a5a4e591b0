"""ModelOpt's own files: every bit comes back, a plain ModelOpt script reads them, nothing stays patched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import native, quantizers
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.training.student import save_modelopt
from qdqbench.quantize.utils.system.quiet import quiet

from ...support.modelopt_folder import load_modelopt
from ...support.tiny_bert import Quantized, assert_same_state, calibrate, padded_batch, recipe_with

SMOOTH: dict[str, Any] = {"calibration": {"smoothing": 0.5}}
RECIPES: dict[str, dict[str, Any]] = {
    "linears": {"name": "bert-int8-linears"},
    "smoothing": {"name": "bert-int8-linears-per-tensor", **SMOOTH},
    "attention": {"name": "bert-int8-attention", **SMOOTH},
    "residual": {"name": "bert-int8-attention", "residual": "int8", **SMOOTH},
}


@pytest.fixture(scope="module", params=RECIPES)
def fake_quant(tiny_bert: Path, request: Any) -> Quantized:
    return calibrate(tiny_bert, recipe_with(**RECIPES[request.param]))


@pytest.mark.parametrize("rebuilt", [False, True], ids=["calibrated", "restored"])
def test_every_bit_comes_back(tiny_bert: Path, tmp_path: Path, fake_quant: Quantized, rebuilt: bool) -> None:
    model, plan, record = fake_quant
    if rebuilt:
        model = load_model(str(tiny_bert))
        ptq.restore(model, plan, record)
    from transformers import PreTrainedModel

    methods = (PreTrainedModel.save_pretrained, PreTrainedModel.from_pretrained.__func__)
    save_modelopt(model, tmp_path)
    loaded = load_modelopt(tmp_path)
    assert methods == (PreTrainedModel.save_pretrained, PreTrainedModel.from_pretrained.__func__)
    assert not loaded.training
    assert_same_state(model, loaded)
    factors = [name for name in model.state_dict() if name.endswith("_pre_quant_scale")]
    assert bool(factors) == bool(record.smoothing.inputs)
    assert quantizers.list_quantizers(model).keys() == quantizers.list_quantizers(loaded).keys()
    assert torch.equal(quantizers.forward(model, padded_batch()), quantizers.forward(loaded, padded_batch()))


def test_what_was_loaded_can_be_trained_and_saved_again(tiny_bert: Path, tmp_path: Path) -> None:
    save_modelopt(calibrate(tiny_bert, recipe_with(**RECIPES["attention"])).model, tmp_path / "first")
    model = load_modelopt(tmp_path / "first")
    ratios = native.learn_amax(model)
    with pytest.raises(RuntimeError, match="settle"):
        save_modelopt(model, tmp_path / "early")
    assert not (tmp_path / "early").exists()
    with torch.no_grad():
        for ratio in ratios:
            ratio.mul_(0.9)
    native.settle_learned(model)
    save_modelopt(model, tmp_path / "second")
    again = load_modelopt(tmp_path / "second")
    assert torch.equal(quantizers.forward(model, padded_batch()), quantizers.forward(again, padded_batch()))


@pytest.fixture
def patched() -> Iterator[None]:
    """transformers as `mto.enable_huggingface_checkpointing()` leaves it, until the test ends."""
    import modelopt.torch.opt as mto
    from modelopt.torch.opt.plugins import huggingface
    from transformers import PreTrainedModel, modeling_utils

    owners = (PreTrainedModel, modeling_utils)
    before = [{**vars(owner)} for owner in owners]
    mto.enable_huggingface_checkpointing()
    assert "_modelopt_cache" in vars(PreTrainedModel)
    yield
    for owner, values in zip(owners, before, strict=True):
        for name in [name for name, value in vars(owner).items() if values.get(name) is not value]:
            if name in values:
                setattr(owner, name, values[name])
            else:
                delattr(owner, name)
    huggingface._PATCHED_CLASSES.clear()


@pytest.mark.usefixtures("patched")
def test_modelopt_itself_reads_it(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = calibrate(tiny_bert, recipe_with(**RECIPES["smoothing"])).model
    save_modelopt(model, tmp_path)
    with quiet("transformers"):
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert_same_state(model, theirs)
    expected = quantizers.forward(model, padded_batch())
    torch.testing.assert_close(quantizers.forward(theirs, padded_batch()), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(quantizers.forward(load_modelopt(tmp_path), padded_batch()), expected)
