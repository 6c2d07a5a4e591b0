"""`diagnose`: each fault is found, grouped, ranked, and mended by commands that exist."""

import json
import re
import shlex
import struct

import numpy as np
import onnx
import pytest
import typer

from qdqbench.cli.app import app
from qdqbench.quantize.engine.backend import build_engine, choose_backend
from qdqbench.quantize.lint.diagnose import diagnose
from qdqbench.quantize.lint.findings import WORST_FIRST, read_kinds
from qdqbench.quantize.lint.fix import FixOptions, rewrite
from qdqbench.quantize.utils.errors import UserError

from ...support.broken_layers import CASES, IDS
from ...support.build_logs import POLYGRAPHY, line, missing_scale, trtexec
from ...support.foreign_layer import float_layer, write_static
from ...support.layer_tables import bert, inspector_json
from ...support.tiny_layer import LINEARS, healthy


def saved(tmp_path, model, name="model.onnx"):
    onnx.save(model, tmp_path / name)
    return tmp_path / name


def written(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def table(tmp_path, **form):
    return written(tmp_path, "layers.json", inspector_json(bert(**form)))


def mended(model):
    done: list[str] = []
    left: list[str] = []
    _, work = rewrite(model, FixOptions(), {}, done, left)
    return work, done, left


def codes(report):
    return [found.code for found in report.findings]


def one(report, code):
    return next(found for found in report.findings if found.code == code)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_check_finds_is_found(tmp_path, case):
    report = diagnose([saved(tmp_path, case.broken())])
    found = one(report, case.code)
    assert (found.effect == "refused") == (case.int8 is None) or case.code in {
        "opset-too-low",
        "invalid-onnx",
    }
    assert found.nodes
    assert len(codes(report)) == len({*codes(report)})  # grouped: one finding a code
    assert not re.search(r"\{\w*\}", found.what + " ".join(found.fixes))


def test_commands_of_fixes_exist():
    """Each `qdqbench` command of a fix is one, with options that it has; each code that it allows too."""
    commands, codes = typer.main.get_command(app).commands, read_kinds()
    fixes = [fix for kind in codes.values() for fix in kind.fixes]
    fixes.append("qdqbench recipes from-cache CACHE --model MODEL --onnx MODEL.onnx")
    options = {name for parameter in commands["check"].params for name in parameter.opts}
    for fix in fixes:
        assert {*re.findall(r"`qdqbench (\S+?)`", fix)} <= {*commands}
        assert {*re.findall(r"--allow (\S+)", fix)} <= {*codes}
        if not fix.startswith(("qdqbench ", "trtexec ", "build ", "give ")):
            assert {*re.findall(r"--\w+", fix)} <= options
    ours = [shlex.split(fix) for fix in fixes if fix.startswith("qdqbench ")]
    assert len(ours) > 10
    for words in ours:
        command = commands[words[1]]
        if hasattr(command, "commands"):
            command = command.commands[words[2]]
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options


def test_a_file_in_the_form_of_qdqbench_has_no_errors(tmp_path):
    model, _, _ = mended(healthy("fp16"))
    report = diagnose([saved(tmp_path, model)])
    assert [found.effect for found in report.findings] == []


def test_the_worst_comes_first(tmp_path):
    report = diagnose([write_static(tmp_path, "static.onnx")])
    places = [WORST_FIRST.index(found.effect) for found in report.findings]
    assert places == sorted(places)
    assert report.findings[0].effect == "refused"
    shares = [found.share or 0.0 for found in report.findings if found.effect == "slow"]
    assert shares == sorted(shares, reverse=True)
    assert "GEMM FLOPs" in report.ranked_by
    assert report.errors


def test_shares_are_of_flops(tmp_path):
    """Three of six equal GEMMs of one row of tokens touch about their part."""
    model = healthy("factored")
    for name in LINEARS[:2]:
        node = next(n for n in model.graph.node if n.name == name)
        pair = next(n for n in model.graph.node if n.output[0] == node.input[0])
        dq = next(n for n in model.graph.node if n.output[0] == pair.input[0])
        q = next(n for n in model.graph.node if n.output[0] == dq.input[0])
        cast = next(n for n in model.graph.node if n.output[0] == q.input[0])
        node.input[0] = cast.input[0]
    report = diagnose([saved(tmp_path, model)])
    half = one(report, "half-quantized")
    assert half.nodes == LINEARS[:2]
    assert "2 of 7" in half.what
    linear, product, head = 2 * 32 * 32, 2 * 128 * 32, 2 * 3 * 32 / 128
    assert half.share == pytest.approx(2 * linear / (4 * linear + 2 * product + head))


def test_an_fp32_file_is_told_how_to_be_quantized(tmp_path):
    report = diagnose([saved(tmp_path, float_layer())])
    found = one(report, "no-qdq")
    assert found.effect == "not INT8"
    assert found.fixes[0].startswith("qdqbench run ")
    assert report.files[0].what.startswith("not quantized")


@pytest.mark.parametrize(
    ("name", "producer", "key", "told"),
    [
        ("/a/input_quantizer/QuantizeLinear", "pytorch", "", "fake-quantized in PyTorch"),
        ("QuantizeLinear_/a/nncf_smooth_quant_output_1", "pytorch", "", "NNCF"),
        ("x_QuantizeLinear", "onnx.quantize", "", "ModelOpt"),
        ("x_QuantizeLinear", "onnx.quantize", "onnx.infer", "ONNX Runtime"),
        ("q", "somebody", "", "explicit Q/DQ (somebody)"),
        ("q", "pytorch", "qdqbench.recipe", "written by qdqbench"),
    ],
)
def test_who_quantized_a_file(tmp_path, name, producer, key, told):
    model = healthy("fp32")
    next(node for node in model.graph.node if node.op_type == "QuantizeLinear").name = name
    model.producer_name = producer
    onnx.helper.set_model_props(model, {key: "1"} if key else {})
    assert told in diagnose([saved(tmp_path, model)]).files[0].what


def test_operators_of_onnxruntimes_optimizer(tmp_path):
    model = float_layer()
    norm = next(node for node in model.graph.node if node.op_type == "LayerNormalization")
    norm.op_type, norm.domain = "SkipLayerNormalization", "com.microsoft"
    norm.input.insert(1, norm.input[0])
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    found = one(diagnose([saved(tmp_path, model)]), "onnxruntime-operators")
    assert (found.effect, found.nodes) == ("refused", [norm.name])


def test_implicit_calibration_is_told_with_every_file_that_shows_it(tmp_path):
    path = saved(tmp_path, float_layer())
    log = written(tmp_path, "build.log", trtexec(*missing_scale("/layer/Add", "/layer/norm1")))
    cache = written(tmp_path, "c.cache", f"TRT-8601-EntropyCalibration2\nx: {struct.pack('>f', 0.1).hex()}\n")
    report = diagnose([log, path, cache])
    found = one(report, "implicit-calibration")
    assert "no-qdq" not in codes(report)
    assert found.files == ["build.log", "c.cache", "model.onnx"]
    assert found.nodes == ["/layer/Add", "/layer/norm1"]
    assert '2 lines with "Missing scale and zero-point"' in found.why
    assert "scales of 1 tensors" in found.why
    assert found.share
    assert one(report, "weak-typing").effect == "note"


def test_weak_typing_is_gone_in_tensorrt_11(tmp_path):
    log = trtexec(line("Unknown option: --int8", "E"), version="110000", verdict="FAILED")
    found = one(diagnose([written(tmp_path, "b.log", log)]), "weak-typing")
    assert (found.effect, found.severity) == ("refused", "error")
    strong = trtexec(options="--onnx=m.onnx --stronglyTyped")
    assert "weak-typing" not in codes(diagnose([written(tmp_path, "s.log", strong)]))


@pytest.mark.parametrize(
    ("load", "told"), [("8x128", False), ("8x96", False), ("1x16", True), ("32x128", True)]
)
def test_shapes_far_from_the_optimum(tmp_path, load, told):
    report = diagnose([written(tmp_path, "b.log", trtexec(load=load))])
    assert ("far-from-opt" in codes(report)) == told
    if told:
        assert f"--optShapes=input_ids:{load}" in one(report, "far-from-opt").fixes[0]


def test_polygraphys_errors(tmp_path):
    report = diagnose([written(tmp_path, "p.log", POLYGRAPHY)])
    assert one(report, "log-no-kernel").what == "no kernel takes {ForeignNode[a...b]}"
    assert "implicit-calibration" in codes(report)


def test_a_failure_that_no_rule_knows_is_quoted(tmp_path):
    report = diagnose([written(tmp_path, "b.log", trtexec(line("a new error", "E"), verdict="FAILED"))])
    assert "a new error" in one(report, "build-failed").why


def test_launches_that_bound_the_time(tmp_path):
    report = diagnose([written(tmp_path, "b.log", trtexec(compute=0.3, enqueue=0.5))])
    assert one(report, "launch-bound").fixes[0] == "trtexec --useCudaGraph"


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ({"raw": True}, "raw-int32-as-fp16"),
        ({"output": "Float"}, "gemm-writes-fp32"),
        ({"attention": "apart"}, "attention-apart"),
        ({"merged": False}, "qkv-apart"),
        ({"dequantized": ("layer.0/output/dense",)}, "engine-not-int8"),
        ({}, "version-unknown"),
    ],
)
def test_faults_of_an_engine(tmp_path, form, code):
    assert code in codes(diagnose([table(tmp_path, **form)]))


def test_a_profile_ranks_by_measured_time(tmp_path):
    rows = bert(attention="apart", output="Float")
    layers = written(tmp_path, "layers.json", inspector_json(rows))
    spent = [{"count": 10}] + [
        {"name": row.name, "timeMs": 1.0, "averageMs": 4.0 if "Maxr" in row.name else 0.01, "percentage": 1.0}
        for row in rows
    ]
    profile = written(tmp_path, "profile.json", json.dumps(spent))
    report = diagnose([profile, layers])
    found = one(report, "attention-apart")
    assert found.basis == "profiled time"
    assert found.share > 0.9
    slow = [each.code for each in report.findings if each.effect == "slow"]
    assert slow[0] == "attention-apart"
    assert "by the names of kernels" in report.joined[-1]
    assert "layers.json" in found.files
    assert "profile.json" in found.files


def test_the_versions_of_the_fused_attention(tmp_path):
    layers = table(tmp_path)
    old = written(tmp_path, "old.log", trtexec(version="100000"))
    assert "10.0.1.6" in one(diagnose([layers, old]), "known-fault").what
    new = written(tmp_path, "new.log", trtexec(version="101400"))
    assert "known-fault" not in codes(diagnose([layers, new]))


def test_a_graph_and_the_table_of_its_engine_are_read_together(tmp_path):
    """What the graph explains the table confirms, and does not tell again."""
    pytest.importorskip("tensorrt_rtx")
    model = next(case for case in CASES if case.code == "half-quantized").broken()
    path = saved(tmp_path, model)
    built = build_engine(path, choose_backend("tensorrt_rtx"), [])
    layers = {"layers": [row.model_dump() for row in built.layers]}
    table = written(tmp_path, "layers.json", json.dumps(layers))
    report = diagnose([path, table])
    assert report.joined == ["model.onnx and layers.json by the names of ONNX nodes"]
    half = one(report, "half-quantized")
    assert half.files == ["model.onnx", "layers.json"]
    assert "the layer table shows 1 of these GEMMs outside of INT8" in half.why
    told = [found for found in report.findings if found.code == "engine-not-int8"]
    assert all(half.nodes[0] not in found.nodes for found in told)


def test_files_of_two_builds_are_not_joined(tmp_path):
    report = diagnose([saved(tmp_path, healthy("fp16")), table(tmp_path)])
    assert "were not joined" in report.joined[0]


def test_two_of_one_kind_are_refused(tmp_path):
    first, second = saved(tmp_path, float_layer()), saved(tmp_path, healthy(), "other.onnx")
    with pytest.raises(UserError, match="one by one"):
        diagnose([first, second])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"PK\x03\x04rest", "zip archive"),
        (b"\x80\x04\x95\x10", "pickle"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"", "is empty"),
        (b"{}", "but no layer table"),
        (b'[{"values": []}]', "outputs of an engine"),
        (b"just text", "is text"),
        (b"ptrt" + bytes(8), "no whole engine"),
        (b"\x08\x0a" + bytes(64), "model|ONNX"),
    ],
)
def test_what_is_no_file_of_a_build(tmp_path, data, told):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(UserError, match=told):
        diagnose([tmp_path / "file"])


def test_an_engine_is_known_by_its_header(tmp_path):
    header = bytearray(64)
    header[:4], header[24:28] = b"ptrt", bytes([10, 0, 0, 6])
    (tmp_path / "model.plan").write_bytes(bytes(header))
    report = diagnose([tmp_path / "model.plan"])
    assert report.files[0].what == "tensorrt 10.0.0.6, 64 bytes"
    assert codes(report) == ["known-fault", "engine-not-read"]


def test_names_of_files_do_not_matter(tmp_path):
    path = saved(tmp_path, float_layer(), "build.log")
    assert diagnose([path]).files[0].kind == "ONNX file"
    assert np.isclose(one(diagnose([path]), "no-qdq").share or 0.0, 0.3, atol=0.3)
