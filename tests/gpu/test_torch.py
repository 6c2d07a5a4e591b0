"""Calibration and PyTorch evaluation on a GPU: what a CPU gives, up to rounding."""

import numpy as np
import pytest

from qdqbench.eval.metrics import runners
from qdqbench.eval.stages import stages
from qdqbench.quantize.calibration.fakequant.quantizers import import_modelopt, list_quantizers
from qdqbench.quantize.calibration.record import read_record
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.tasks.task import get_task

from .conftest import invoke


@pytest.fixture(autouse=True)
def no_kernels_of_modelopt(monkeypatch) -> None:
    """ModelOpt compiles its own kernels for a minute, and prints; another arithmetic than ours."""

    import_modelopt()  # without its warning

    def refuse(**_: object) -> None:
        raise AssertionError("ModelOpt's kernels are not to be taken")

    monkeypatch.setattr("modelopt.torch.quantization.tensor_quant.get_cuda_ext", refuse)


@pytest.mark.parametrize("name", ["bert-int8-linears-per-tensor", "bert-int8-attention"])
def test_the_gpu_calibrates_and_evaluates_as_the_cpu_does(sst2, tmp_path, monkeypatch, name):
    recipe = load_recipe(name)
    changes = {  # which of channels that are nearly alike are split differs
        "engine": recipe.engine.model_copy(update={"backend": "cuda"}),
        "calibration": recipe.calibration.model_copy(update={"outlier_channel_splitting": 0}),
    }
    recipe = recipe.model_copy(update=changes)
    config = RunConfig(recipe=recipe, model=str(sst2.model), task=get_task("sst2"), data=str(sst2.data))
    records, logits = {}, {}
    for place in ("gpu", "cpu"):
        session = Session(config, tmp_path / place)
        session.folder.mkdir()
        with monkeypatch.context() as patch:
            if place == "cpu":
                patch.setattr(runners, "gpu", lambda: None)
            stages.quantize_stage(session)
            stages.torch_stage("fake_quant", (), lambda s: s.fake_quant_model).run(session)
        assert session.fake_quant_model.device.type == "cpu"
        assert {q.backend for q in list_quantizers(session.fake_quant_model).values()} == {None}
        records[place] = read_record(session.record_path)
        with np.load(session.folder / "logits" / "fake_quant.npz") as stored:
            logits[place] = stored["validation.logits"]
    for quantizer, state in records["cpu"].quantizers.items():
        ours = records["gpu"].quantizers[quantizer].amax
        np.testing.assert_allclose(ours, state.amax, rtol=0.02, err_msg=quantizer)
    spread = logits["cpu"].std()
    assert np.abs(logits["gpu"] - logits["cpu"]).mean() < 0.02 * spread


def test_sensitivity_takes_no_kernels_of_modelopt(sst2, tmp_path):
    pytest.importorskip("optuna")
    options = [*sst2.options, "--set", "engine.backend=cuda", "--set", "calibration.samples=64"]
    options += ["--samples", 32, "--out", tmp_path / "out"]
    outcome = invoke("sensitivity", "bert-int8-attention", *options)
    assert outcome.exit_code == 0, outcome.exception
