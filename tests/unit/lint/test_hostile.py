"""Damaged and hostile files: every one ends in a finding or one clear error, in little time and memory."""

import json
import os
import time

import onnx
import pytest

from qdqbench.quantize.lint.diagnose import diagnose
from qdqbench.quantize.utils.errors import UserError

from ...support.foreign_layer import float_layer

SECONDS = 5.0


def hold(path, seconds=SECONDS):
    """Whether the file was read; an error must be one sentence of ours."""
    started, said = time.perf_counter(), ""
    try:
        report = diagnose([path])
        json.dumps(report.model_dump(mode="json"), allow_nan=False)
    except UserError as error:
        said = str(error) or "nothing"
    assert said != "nothing"
    assert len(said) < 5_000
    assert time.perf_counter() - started < seconds
    return not said


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/hostname", "link.bin", ".", "", "/dev/zero"])
def test_weights_outside_of_the_folder_are_not_read(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(4096))
    os.symlink(tmp_path / "outside.bin", folder / "link.bin")
    model = float_layer()
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"external data|unnamed file|which is missing"):
        diagnose([folder / "model.onnx"])


@pytest.mark.parametrize(
    "text",
    [
        "[I] Name: " * 30_000 + "\n",
        "[I] Name: a, LayerType: gemm, Inputs: ["
        + "{ Name: x, Datatype: Int8 }], Constants: [" * 2000
        + "\n",
        ("[I] Input build shape: " + "a" * 8000 + "\n") * 300,
        ("[I] " + "--a" * 2000 + " trtexec\n") * 300,
        "[I] Optimization {x [min=[" + "1, " * 5000 + "\n",
        ("[W] [TRT] Missing scale and zero-point for tensor " + "t" * 600 + "\n") * 2_000,
        "[" * 100_000,
        '[{"ms": ' + "[" * 100_000,
        '{"Layers": ' + '{"a":' * 100_000,
        '[{"startComputeMs": 1, "x": "' + '\\"' * 500_000,
        '[{"startComputeMs": 1, "x": ' + "nan(" * 250_000,
    ],
    ids=range(11),
)
def test_texts_that_are_made_to_take_long(tmp_path, text):
    (tmp_path / "file").write_text(text)
    hold(tmp_path / "file", 20.0)
