"""`diagnose`: each fault is found, grouped, ranked, and mended by commands that exist."""

import json
import re
import shlex
import struct
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
import yaml

from qdqbench.cli.app import app
from qdqbench.quantize.engine.backend import build_engine, choose_backend
from qdqbench.quantize.lint.diagnose import diagnose
from qdqbench.quantize.lint.findings import WORST_FIRST, find, read_kinds
from qdqbench.quantize.lint.fix import FixOptions, rewrite
from qdqbench.quantize.utils.errors import UserError

from ...support.broken_layers import CASES, IDS
from ...support.build_logs import POLYGRAPHY, line, missing_scale, trtexec
from ...support.foreign_layer import float_layer, write_static
from ...support.layer_tables import bert, inspector_json
from ...support.tiny_layer import LINEARS, healthy, skip_qdq

HERE = Path(__file__).parent
BUILDS = yaml.safe_load((HERE / "builds.yaml").read_text(encoding="utf-8"))
LINES = yaml.safe_load((HERE / "log_lines.yaml").read_text(encoding="utf-8"))


def saved(tmp_path, model, name="model.onnx"):
    onnx.save(model, tmp_path / name)
    return tmp_path / name


def written(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def table(tmp_path, **form):
    return written(tmp_path, "layers.json", inspector_json(bert(**form)))


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


def build_files(folder, case):
    """The files of a case."""
    if form := case.get("onnx"):
        yield saved(folder, float_layer() if form == "float" else healthy(form))
    if "table" in case:
        yield table(folder, **case["table"])
    if log := case.get("log"):
        text = POLYGRAPHY
        if log != "polygraphy":
            said = [line(*each) for each in log.get("lines", ())] + missing_scale(*log.get("missing", ()))
            text = trtexec(*said, **{key: log[key] for key in log if key not in ("lines", "missing")})
        yield written(folder, "build.log", text)
    if case.get("cache"):
        scale = struct.pack(">f", 0.1).hex()
        yield written(folder, "c.cache", f"TRT-8601-EntropyCalibration2\nx: {scale}\n")
    if version := case.get("engine"):
        (folder / "model.plan").write_bytes(b"ptrt" + bytes(20) + bytes(version) + bytes(36))
        yield folder / "model.plan"


@pytest.mark.parametrize("case", BUILDS, ids=lambda case: case["case"])
def test_a_build(tmp_path, case):
    report = diagnose([*build_files(tmp_path, case)])
    for code, words in case.get("expect", {}).items():
        found = one(report, code).model_dump()
        for name, part in words.items():
            text = " ".join(found[name]) if name == "fixes" else found[name]
            assert part == text if isinstance(part, list) else part in text, (code, name)
    told = {row.name: [row.kind, row.what] for row in report.files}
    for name, (kind, what) in case.get("files", {}).items():
        assert told[name][0] == kind
        assert what in told[name][1]
    assert not {*codes(report)}.intersection(case.get("without", ()))
    assert codes(report) == case.get("only", codes(report))
    assert case.get("joined", "") in " ".join(report.joined)


@pytest.mark.parametrize(("said", "code", "words"), [row[:3] for row in LINES])
def test_a_line_of_a_failed_build(tmp_path, said, code, words):
    options = "--onnx=it.onnx --stronglyTyped"
    text = trtexec(said, options=options, version="100300", verdict="FAILED")
    report = diagnose([written(tmp_path, "build.log", text)])
    assert [each for each in codes(report) if each != "wide-profile"] == [code]
    found = one(report, code)
    assert words in found.what
    assert not re.search(r"\{\w+\}", " ".join([found.what, found.why, *found.fixes]))
    named = [fix for fix in found.fixes if "qdqbench run" not in fix]
    assert "MODEL.onnx" not in " ".join(named)  # the log names it
    passed = diagnose([written(tmp_path, "passed.log", text.replace("FAILED", "PASSED"))])
    assert (code in codes(passed)) == (found.effect != "refused")


def test_every_finding_of_a_log_has_a_line():
    assert {code for _, code, *_ in LINES} == {*read_kinds("log")}


def test_the_forty_most_frequent_lines_are_of_public_threads():
    """Each has an address and a fix; the file has the most frequent first."""
    seen = [len(threads) for *_, threads in LINES]
    assert seen == sorted(seen, reverse=True)
    assert len(list(filter(None, seen))) >= 40
    for _, code, _, threads in LINES:
        assert read_kinds("log")[code].fixes
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in threads)


def test_words_of_the_table_are_filled():
    """What a title, cause or fix leaves open is a word of a rule, never printed as it stands."""
    with pytest.raises(KeyError, match="reasons"):
        find("implicit-calibration")


def test_fixes_follow_from_the_files_that_are_given(tmp_path):
    log = written(tmp_path, "build.log", trtexec(line("a new error", "E"), verdict="FAILED"))
    alone = one(diagnose([log]), "build-failed").fixes
    both = one(diagnose([log, saved(tmp_path, healthy())]), "build-failed").fixes
    assert alone == ["qdqbench check model.onnx", "give the ONNX file too", *both]


def test_a_useless_file_does_not_end_the_diagnosis(tmp_path):
    useless = written(tmp_path, "notes.txt", "just text")
    report = diagnose([useless, saved(tmp_path, float_layer())])
    told = [(row.name, row.kind) for row in report.files]
    assert told == [("model.onnx", "ONNX file"), ("notes.txt", "not read")]
    assert "is text" in report.files[1].what
    assert codes(report) == ["no-qdq"]
    with pytest.raises(UserError, match="none of the files"):
        diagnose([useless, written(tmp_path, "empty", "")])


def test_a_file_in_the_form_of_qdqbench_has_no_errors(tmp_path):
    report = diagnose([saved(tmp_path, rewrite(healthy("fp16"), FixOptions(), {}).work)])
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
    for name in ("query", "key"):
        skip_qdq(model, f"/layer/{name}/input")
    report = diagnose([saved(tmp_path, model)])
    half = one(report, "half-quantized")
    assert half.nodes == LINEARS[:2]
    assert "2 of 7" in half.what
    linear, product, head = 2 * 32 * 32, 2 * 128 * 32, 2 * 3 * 32 / 128
    assert half.share == pytest.approx(2 * linear / (4 * linear + 2 * product + head))


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


def test_names_of_files_do_not_matter(tmp_path):
    path = saved(tmp_path, float_layer(), "build.log")
    assert diagnose([path]).files[0].kind == "ONNX file"
    assert np.isclose(one(diagnose([path]), "no-qdq").share or 0.0, 0.3, atol=0.3)
