"""A model of a type that is not known: refused with what to do, then run by the recipe that this writes."""

import pytest

from qdqbench.quantize.models.families import known

from ..support.families import write_model
from .test_run import needs_rtx
from .tiny import entries, fine, refused, results

pytestmark = pytest.mark.slow


@pytest.mark.long
@needs_rtx
def test_the_path_of_an_unknown_type(sst2, tmp_path, qdqbench, monkeypatch):
    """RoFormer: an attention of its own, which rotates q and k."""
    monkeypatch.setattr(known, "_DESCRIBED", {})
    model = write_model(tmp_path / "model", "roformer", entries())
    given = ["--model", model, "--task", "sst2", "--data", sst2.data, "--out", tmp_path / "run"]
    refused(
        qdqbench("run", *given),
        f"model {model} is a 'roformer'",
        f"`qdqbench recipes new --model {model}` writes a recipe",
    )
    assert not (tmp_path / "run").exists()

    written = tmp_path / "mine.yaml"
    assert qdqbench("recipes", "new", "--model", model, "--out", written).code == 0
    # random answers lie on the edge, so how many turn says nothing
    written.write_text(written.read_text().replace("max_drop: 0.01", "max_drop: 1.0"))
    fine(qdqbench("run", written, *given))
    found = results(tmp_path / "run")
    assert len(found["quantized_layers"]) == 12
    assert found["engine"]["int8_gemms"] == found["engine"]["expected_int8_gemms"] == 12
    assert found["engine"]["not_int8"] == []
    assert found["parity"]["passed"]
    assert found["findings"] == []
