"""Build logs: what each tool says, and what is kept of it."""

import pytest

from qdqbench.quantize.lint.logs import MAX_LINE, is_log, read_log
from qdqbench.quantize.utils.errors import UserError

from ...support.build_logs import POLYGRAPHY, line, missing_scale, trtexec


def read(tmp_path, text):
    (tmp_path / "build.log").write_text(text)
    return read_log(tmp_path / "build.log")


def test_a_log_of_trtexec(tmp_path):
    text = trtexec(*missing_scale("a", "b", "a"), line("Error Code 4: no", "E"), verdict="FAILED")
    found = read(tmp_path, text)
    assert is_log(text.encode())
    assert (found.tool, found.version, found.device, found.passed) == ("trtexec", "8.6.1", "NVIDIA L4", False)
    assert found.options == {"onnx": "model.onnx", "int8": "", "fp16": ""}
    assert found.precision == "FP32+FP16+INT8"
    assert found.signs["missing-scale"] == 3
    assert found.names["missing-scale"] == ["a", "b"]
    assert found.profiles == [{"input_ids": ((1, 1), (8, 128), (32, 512))}]
    assert found.load == {"input_ids": (8, 128)}
    assert found.medians == {"Enqueue Time": 0.2, "H2D Latency": 0.012, "GPU Compute Time": 1.0}
    assert found.errors == ["Error Code 4: no"]


def test_a_log_of_polygraphy(tmp_path):
    found = read(tmp_path, POLYGRAPHY)
    assert (found.tool, found.version, found.precision) == ("Polygraphy", "10.0.0", "[INT8]")
    shapes = ((1, 1), (8, 128), (32, 512))
    assert found.profiles == [{"input_ids": shapes, "attention_mask": shapes}]
    assert found.names["log-no-kernel"] == ["{ForeignNode[a...b]}"]
    assert found.passed is None


def test_versions_of_both_schemes(tmp_path):
    for number, text in (("8601", "8.6.1"), ("100600", "10.6.0"), ("101401", "10.14.1")):
        assert read(tmp_path, trtexec(version=number)).version == text


def test_the_layer_table_of_a_detailed_build(tmp_path):
    row = (
        "Name: /a/MatMul_myl0_1, LayerType: gemm, "
        "Inputs: [ { Name: x, Dimensions: [1,4], Datatype: Int8, Format: f }], "
        "Constants: [ { Name: w, Dimensions: [4,4], Datatype: Int8, Format: f }], "
        "Outputs: [ { Name: y, Dimensions: [1,4], Datatype: Half, Format: f }], TacticName: t, "
        "Metadata: [ONNX Layer: /a/MatMul]"
    )
    layers = read(tmp_path, trtexec(line(f"[TRT] {row}", "V"))).layers
    assert [(each.name, each.inputs, each.constants, each.onnx) for each in layers] == [
        ("/a/MatMul_myl0_1", ["Int8"], ["Int8"], ["/a/MatMul"])
    ]


@pytest.mark.parametrize("text", ["Dear diary,\nnothing happened.\n", "a,b\n1,2\n"])
def test_other_text_is_no_log(tmp_path, text):
    assert not is_log(text.encode())
    with pytest.raises(UserError, match="no build log"):
        read(tmp_path, text)


def test_a_line_without_end_is_cut(tmp_path):
    found = read(tmp_path, trtexec(*missing_scale("x" * (2 * MAX_LINE)), *missing_scale("kept")))
    assert found.names["missing-scale"] == ["kept"]


FAILED = trtexec(line("[TRT] Error Code 9: incorrectly marked as an int8 node", "E"), verdict="FAILED")


@pytest.mark.parametrize(
    "data",
    [
        FAILED.encode("utf-16"),  # as PowerShell redirects
        FAILED.replace("\n", "\r\n").encode("utf-8-sig"),
        "".join(f"\x1b[38;5;9m{each}\x1b[0m\n" for each in FAILED.splitlines()).encode(),
        "".join(f"trt-1  | 2026-01-02T03:04:05Z {each}\n" for each in FAILED.splitlines()).encode(),
    ],
    ids=["utf-16", "crlf", "colors", "container"],
)
def test_a_log_is_read_as_its_program_wrote_it(tmp_path, data):
    (tmp_path / "build.log").write_bytes(data)
    found = read_log(tmp_path / "build.log")
    assert is_log(data)
    assert (found.version, found.passed, found.precision) == ("8.6.1", False, "FP32+FP16+INT8")
    assert found.signs["log-marked-int8"] == 1


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("[TensorRT] ERROR: Network must have at least one output", "log-no-outputs"),
        (
            "2026 [E:onnxruntime:Default, tensorrt_execution_provider.h:88 log] [2026 ERROR] 4: no "
            "optimization profile has been defined",
            "log-no-profile",
        ),
        (
            "ERROR: [Torch-TensorRT TorchScript Conversion Context] - Unable to load library: libnvinfer.so",
            "log-library",
        ),
        (
            "E01 1 logging.cc:40] 1: Error Code 1: Serialization (Version tag does not match)",
            "log-other-version",
        ),
    ],
)
def test_logs_of_programs_around_tensorrt(tmp_path, said, code):
    found = read(tmp_path, said)
    assert is_log(said.encode())
    assert set(found.signs) == {code}


@pytest.mark.parametrize("text", ['{"Layers": ["[TensorRT] ERROR"]}', '[{"name": "[TRT] [E] Error Code 1"}]'])
def test_json_is_no_log(text):
    assert not is_log(text.encode())
