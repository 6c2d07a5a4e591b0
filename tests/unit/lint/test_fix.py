"""`fix` on every broken layer of `check`, and on what ONNX Runtime's quantizers write."""

import subprocess
import sys
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantFormat, QuantType

from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.lint import runs
from qdqbench.quantize.lint.check import check_file, check_model
from qdqbench.quantize.lint.fix import (
    _FORMS,
    FixOptions,
    compare_outputs,
    engine_row,
    finite_masks,
    fix,
    rewrite,
    to_half,
)
from qdqbench.quantize.lint.rebuild import remove_qdq
from qdqbench.quantize.lint.runs import measure_ranges, run_batches
from qdqbench.quantize.lint.view import PLAIN_FORMS
from qdqbench.quantize.utils.errors import UserError

from ...support.broken_layers import CASES, IDS
from ...support.foreign_layer import float_layer, samples, write_dynamic, write_static
from ...support.graphs import model_of
from ...support.tiny_layer import FORMS, healthy, stored

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
# What no rewrite can know: a bad scale's range, a mix's right type, a constant's lost value.
HOPELESS = {
    "mixed-types", "nan-constant", "invalid-onnx", "not-checked", "opset-too-low", "no-plain-form",
    "onnxruntime-operators", "operator-refused",
}  # fmt: skip
SAID = {"bad-scale", "dynamic-scale"}
MASK = np.zeros((1, 1, 1, 4), np.float32)


def mended(model, **options):
    done = []
    left = []
    _, work = rewrite(model, FixOptions(**options), {}, done, left)
    return work, done, left


def feeds():
    return {name: np.concatenate([each[name] for each in samples()]) for name in ("x", "mask")}


def inputs_file(tmp_path):
    np.savez(tmp_path / "samples.npz", **feeds())
    return tmp_path / "samples.npz"


# a weight whose scale is bad has lost its values, and that of an activation its range alone
MENDED = {
    name: case
    for case, name in zip(CASES, IDS, strict=True)
    if case.code not in HOPELESS and not (case.code == "bad-scale" and case.form == "fp32")
}


@pytest.mark.parametrize("case", MENDED.values(), ids=MENDED)
def test_a_broken_layer_is_clean_afterwards(case):
    work, done, left = mended(case.broken())
    report = check_model(work)
    assert report.findings == []
    assert done
    # only attentions that cannot be whole, and inputs that have no scale, lose their INT8
    if case.code in SAID:
        assert len(left) == 1
    elif not left and case.code not in ("partial-attention", "attention-head-size"):
        assert len(report.quantized) >= 5


def offered(model):
    """Codes of findings for which `qdqbench fix` is named."""
    report = check_model(model)
    return {
        each.code for each in report.grouped() if any(text.startswith("qdqbench fix") for text in each.fixes)
    }


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_fix_is_offered_for_it_mends(case):
    if codes := offered(case.broken()):
        assert not codes & {row.code for row in check_model(mended(case.broken())[0]).findings}


@pytest.mark.parametrize("options", [None, {}, {"quant_format": QuantFormat.QOperator}])
def test_what_fix_is_offered_for_in_files_of_onnxruntime_it_mends(tmp_path, options):
    path = (
        write_dynamic(tmp_path, "q.onnx") if options is None else write_static(tmp_path, "q.onnx", **options)
    )
    model = onnx.load(path)
    codes = offered(model)
    assert codes == {row.code for row in check_model(model).findings}
    assert not codes & {row.code for row in check_model(mended(model)[0]).findings}


def test_plain_forms_are_those_that_check_knows():
    assert {*_FORMS} == {*PLAIN_FORMS}


@pytest.mark.parametrize("case", [c for c in CASES if c.code in ("mixed-types", "invalid-onnx")][:3],
                         ids=lambda case: case.code)  # fmt: skip
def test_what_cannot_be_mended_is_an_error_and_nothing_is_written(case, tmp_path):
    onnx.save(case.broken(), tmp_path / "broken.onnx")
    with pytest.raises(UserError):
        fix(tmp_path / "broken.onnx", tmp_path / "out.onnx", FixOptions(engine=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.onnx"]


def test_codes_and_scales_of_a_good_file_stay():
    model = healthy("fp16")
    work, _, left = mended(model)
    assert left == []
    before = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    after = {t.name: onnx.numpy_helper.to_array(t) for t in work.graph.initializer}
    codes, scale = after["/layer/query/MatMul/weight_int8"], after["/layer/query/MatMul/weight_scale"]
    assert np.array_equal(codes.T, before["/layer/query.weight"])  # [N, K] now
    assert np.array_equal(scale, before["/layer/query.weight_scale"])
    int8 = {t.name for t in work.graph.initializer if t.data_type == TensorProto.INT8}
    assert int8 >= {f"/layer/{name}/MatMul/weight_int8" for name in ("query", "key", "value", "output")}


def test_a_zero_point_of_128_changes_no_value(tmp_path):
    """UINT8 codes less 128 are the INT8 codes: outputs are those of the INT8 file."""
    plain = healthy("fp32", int8_attention=False)
    shifted = healthy("fp32", int8_attention=False)
    for name in [t.name for t in shifted.graph.initializer if t.name.endswith("input.zero_point")]:
        stored(name, 128, np.uint8)(shifted)
    work, done, left = mended(shifted, compute="keep")
    assert any("same codes less 128" in text for text in done)
    assert left == []
    assert check_model(work).errors == []
    both = [run_batches(model, samples()[0])[0] for model in (plain, work)]
    for name, value in both[0].items():
        assert np.allclose(both[1][name], value, atol=1e-5)


def test_onnxruntimes_default_file_becomes_int8(tmp_path):
    """Zero points, LayerNorm and softmax in INT8, weights [K, N]: refused before, and not after."""
    path = write_static(tmp_path, "static.onnx")
    assert {row.code for row in check_file(path).errors} >= {"non-zero-zero-point", "quantized-layernorm"}
    report = fix(path, tmp_path / "out.onnx", FixOptions(inputs=inputs_file(tmp_path)))
    assert report.findings_after == {}
    assert report.failures == []
    assert report.int8_after == report.linears
    assert report.outputs.n == 4
    assert report.outputs.holds
    if report.engine_after is not None:  # TensorRT-RTX is installed
        assert report.engine_before.refused
        assert report.engine_after.refused is None
        assert report.engine_after.int8_gemms >= 4


@pytest.mark.parametrize("options", [
    {"activation_type": QuantType.QUInt8, "per_channel": True},
    {"quant_format": QuantFormat.QOperator, "activation_type": QuantType.QUInt8},
], ids=["uint8", "qoperator"])  # fmt: skip
def test_other_formats_of_onnxruntime_become_int8(tmp_path, options):
    path = write_static(tmp_path, "static.onnx", **options)
    before = check_file(path)
    assert before.quantized == []
    report = fix(path, tmp_path / "out.onnx", FixOptions(inputs=inputs_file(tmp_path), engine=False))
    assert report.findings_after == {}
    assert (report.int8_after, report.linears) == (5, 5)
    assert report.outputs.holds


def test_dynamic_quantization_needs_samples_and_says_so(tmp_path):
    path = write_dynamic(tmp_path, "dynamic.onnx")
    alone = fix(path, tmp_path / "alone.onnx", FixOptions(engine=False))
    assert alone.int8_after == 0
    assert "--inputs" in alone.left[0]
    assert alone.outputs.after_error < 0.01  # floating point, with the values of the codes
    given = fix(path, tmp_path / "given.onnx", FixOptions(inputs=inputs_file(tmp_path), engine=False))
    assert given.left == []
    assert given.int8_after >= 4
    assert given.outputs.holds


def test_samples_replace_scales_that_are_bad(tmp_path):
    model = healthy("fp32", int8_attention=False)
    stored("/layer/query/input.scale", 0.0)(model)
    onnx.save(model, tmp_path / "bad.onnx")
    options = FixOptions(inputs=inputs_file(tmp_path), engine=False, max_error=1.0)
    report = fix(tmp_path / "bad.onnx", tmp_path / "out.onnx", options)
    assert report.left == []
    assert report.findings_after == {}
    assert report.int8_after == 4


def test_outputs_that_are_off_are_a_failure(tmp_path):
    path = write_static(tmp_path, "static.onnx")
    out = FixOptions(inputs=inputs_file(tmp_path), engine=False)
    report = fix(path, tmp_path / "out.onnx", out)
    broken = report.outputs.model_copy(update={"after_error": 2 * report.outputs.limit + 1})
    assert report.model_copy(update={"outputs": broken}).failures


def test_stripped_weights_are_the_values_of_their_codes():
    model = healthy("fp32", int8_attention=False)
    before = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    remove_qdq(model)
    after = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    assert not any(n.op_type in ("QuantizeLinear", "DequantizeLinear") for n in model.graph.node)
    values = before["/layer/query.weight"] * before["/layer/query.weight_scale"]
    assert np.allclose(after["/layer/query/weight/DQ.out_values"], values, rtol=1e-6)


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"x": np.zeros((2, 4, 32), np.float32)}, "no array for mask"),
        ({"x": np.zeros((2, 4, 32), np.float32), "mask": MASK}, "different numbers"),
        ({"x": np.zeros((1, 9), np.float32), "mask": MASK}, "refuses"),
        ({"x": np.array([{"a": 1}], dtype=object), "mask": MASK}, "cannot read"),  # never unpickled
    ],
)
def test_inputs_that_do_not_fit_are_refused(tmp_path, arrays, told):
    onnx.save(float_layer(), tmp_path / "model.onnx")
    np.savez(tmp_path / "samples.npz", **arrays)
    options = FixOptions(inputs=tmp_path / "samples.npz", engine=False)
    with pytest.raises(UserError, match=told):
        fix(tmp_path / "model.onnx", tmp_path / "o.onnx", options)


def test_the_file_itself_is_not_overwritten(tmp_path):
    onnx.save(float_layer(), tmp_path / "model.onnx")
    with pytest.raises(UserError, match="the file itself"):
        fix(tmp_path / "model.onnx", tmp_path / "model.onnx", FixOptions())


def test_calibration_sees_no_padding():
    """The largest value of a tensor is that of the tokens that a mask keeps."""
    casts = {"ids": "values", "attention_mask": "out"}
    nodes = [helper.make_node("Cast", [name], [to], to=TensorProto.FLOAT) for name, to in casts.items()]
    inputs = dict.fromkeys(casts, ("batch", "length"))
    model = model_of(nodes, inputs, {"out": None}, **dict.fromkeys(casts, TensorProto.INT64))
    tokens = np.array([[1, 2, 99, 99], [3, 4, 5, 99]])
    kept = np.array([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert measure_ranges(model, ["values"], {"ids": tokens, "attention_mask": kept}) == {"values": 5.0}


def endless():
    """A Loop of 2^62 rounds."""
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=[1])
    flag = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "on")]
    count = helper.make_tensor_value_info("round", TensorProto.INT64, [])
    body = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["a"], ["b"])]
    inner = helper.make_graph(body, "body", [count, flag[0], value("a")], [flag[1], value("b")])
    loop = helper.make_node("Loop", ["rounds", "", "x"], ["y"], body=inner)
    return model_of([loop], {"x": [1]}, {"y": [1]}, {"rounds": np.array(1 << 62)})


def test_an_endless_loop_ends_and_leaves_nothing(tmp_path, monkeypatch):
    onnx.save(endless(), tmp_path / "loop.onnx")
    monkeypatch.setattr(runs, "BATCH_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"took over 0\.5 s for one batch"):
        fix(tmp_path / "loop.onnx", tmp_path / "out.onnx", FixOptions(engine=False))
    assert [path.name for path in tmp_path.iterdir()] == ["loop.onnx"]


@pytest.mark.parametrize(
    ("limit", "named"), [("BUILD_SECONDS", "0 s"), ("BUILD_MEMORY", "0% of the machine's memory")]
)
def test_an_engine_that_takes_too_much_is_given_up(limit, named, tmp_path, monkeypatch):
    pytest.importorskip("tensorrt_rtx")
    onnx.save(float_layer(), tmp_path / "model.onnx")
    monkeypatch.setattr(f"qdqbench.quantize.lint.fix.{limit}", 0)
    row = engine_row(tmp_path / "model.onnx", choose_backend("tensorrt_rtx"))
    assert row.refused == f"the builder took over {named} for model.onnx and was stopped"


def test_an_engine_may_not_take_the_memory_of_a_container(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1048576\n")  # less than this process has
    monkeypatch.setattr("qdqbench.quantize.utils.system.cpu._CGROUPS", tmp_path)
    monkeypatch.setattr(
        "qdqbench.quantize.lint.fix.build_engine", lambda *_, progress: progress("build", 0.5)
    )
    onnx.save(float_layer(), tmp_path / "model.onnx")
    row = engine_row(tmp_path / "model.onnx", SimpleNamespace(name="tensorrt", version="11"))
    assert row.refused == "the builder took over 80% of the machine's memory for model.onnx and was stopped"


CTRL_C = """
import os, signal, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from qdqbench.quantize.lint.runs import run_batches

def press():
    while threading.active_count() < 3:  # the thread that runs the graph has begun
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist may ignore it
threading.Thread(target=press).start()
try:
    run_batches(Path("loop.onnx"), {"x": np.ones(1, np.float32)})
except KeyboardInterrupt:
    deadline = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.exit(130 if threading.active_count() == 1 else "the graph goes on")
"""


def test_ctrl_c_ends_an_endless_loop(tmp_path):
    onnx.save(endless(), tmp_path / "loop.onnx")
    command = [sys.executable, "-c", CTRL_C]
    ended = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 130, ended.stderr


def test_an_input_too_large_for_any_machine_is_one_sentence():
    model = endless()
    for size in (1 << 32, 1 << 32):
        model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = size
    with pytest.raises(UserError, match="too large to be random"):
        runs.random_feeds(model, 0)


@pytest.mark.parametrize("domain", ["", "com.microsoft", "other"])
@pytest.mark.parametrize("operator", ["LayerNormalization", "DynamicQuantizeLinear", "MatMul", *PLAIN_FORMS])
def test_nodes_without_inputs_or_outputs_are_a_finding(operator, domain):
    for inputs, made in (([], ["y"]), (["x"], []), ([], [])):
        model = healthy()
        model.graph.node.append(helper.make_node(operator, inputs, made, domain=domain))
        model.opset_import.append(helper.make_opsetid("other", 1))
        codes = {row.code for row in check_model(model).findings}
        assert codes & {"invalid-onnx", "onnxruntime-operators", "not-checked"}
        if "invalid-onnx" not in codes:
            rewrite(model, FixOptions(), {}, [], [])


MADE = {  # an output of x: the nodes that make it
    "wide": [helper.make_node("Mul", ["x", "big"], ["wide"])],
    "logits": [helper.make_node("Mul", ["x", "scale"], ["logits"])],
    "ids": [
        helper.make_node("Mul", ["x", "scale"], ["product"]),
        helper.make_node("Cast", ["product"], ["ids"], to=TensorProto.INT64),
    ],
    "found": [
        helper.make_node("Mul", ["x", "scale"], ["scaled"]),
        helper.make_node("Greater", ["scaled", "half"], ["over"]),
        helper.make_node("Reshape", ["over", "all"], ["flat"]),
        helper.make_node("Compress", ["scaled", "flat"], ["found"]),
    ],
}


def compared(tmp_path, before, after, *outputs, reference=1.0):
    """The comparison of files whose second output is x times a scale; the first one is 100 x."""

    def model(scale):
        constants = {"big": np.float32(100), "scale": np.float32(scale), "half": np.float32(0.5), "all": [-1]}
        shapes = dict.fromkeys(outputs)
        nodes = [node for name in outputs for node in MADE[name]]
        return model_of(nodes, {"x": ["n", 4]}, shapes, constants, ids=TensorProto.INT64)

    for name, scale in (("before", before), ("after", after)):
        onnx.save(model(scale), tmp_path / name)
    feeds = {"x": np.random.default_rng(0).uniform(0, 1, (16, 4)).astype(np.float32)}
    paths = tmp_path / "before", model(reference), tmp_path / "after"
    return compare_outputs(*paths, feeds, inputs="given", limit=0.1)


def test_each_output_is_compared_on_its_own_and_the_worst_decides(tmp_path):
    """One norm over both would be 0.003: the wide output is a hundred times as large."""
    found = compared(tmp_path, 1.0, 0.7, "wide", "logits")
    assert {row.name: row.holds for row in found.rows} == {"wide": True, "logits": False}
    assert (found.name, found.holds) == ("logits", False)
    assert found.after_error == pytest.approx(0.3, rel=1e-5)


def test_an_output_that_was_wrong_before_is_still_wrong(tmp_path):
    found = compared(tmp_path, 0.02, 0.02, "wide", "logits")
    assert (found.name, found.holds, found.limit) == ("logits", False, 0.5)


def test_integers_are_equal_or_not(tmp_path):
    assert compared(tmp_path, 3.0, 3.0, "wide", "ids", reference=3.0).holds
    found = compared(tmp_path, 3.0, 9.0, "wide", "ids", reference=3.0)
    assert (found.name, found.holds, found.largest) == ("ids", False, 0.0)
    assert 0.5 < found.after_error <= 1


def test_outputs_of_another_length_are_counted(tmp_path):
    same = compared(tmp_path, 1.0, 1.0, "wide", "found")
    assert (same.holds, same.other_lengths) == (True, 0)
    found = compared(tmp_path, 1.0, 0.6, "wide", "found")
    assert (found.name, found.holds, found.other_lengths) == ("found", False, 4)
    assert 0.1 < found.after_error < 1


def test_samples_that_share_no_batch_are_run_as_they_were_given():
    """A graph may compute a size from all of its samples, as one with words and spans does."""
    sized = model_of(
        [
            helper.make_node("ReduceMax", ["n"], ["longest"], keepdims=1),
            helper.make_node("Concat", ["minus", "longest"], ["shape"], axis=0),
            helper.make_node("Reshape", ["x", "shape"], ["y"]),
        ],
        {"x": ["b", 6], "n": ["b"]},
        {"y": None},
        {"minus": np.array([-1])},
        n=TensorProto.INT64,
    )
    feeds = {"x": np.ones((8, 6), np.float32), "n": np.array([5] * 7 + [6])}
    size, (outputs,) = runs.run_fitting(sized, feeds)
    assert (size, outputs["y"].shape) == (8, (8, 6))
    assert measure_ranges(sized, ["y"], feeds) == {"y": 1.0}


@pytest.mark.parametrize(
    "maker",
    [
        helper.make_node("ConstantOfShape", ["size"], ["empty"]),
        helper.make_node("EyeLike", ["square"], ["empty"]),
        helper.make_node("RandomNormal", [], ["empty"], shape=[4, 4], seed=1.0),
        helper.make_node("RandomUniformLike", ["x"], ["empty"], seed=1.0),
    ],
    ids=lambda node: node.op_type,
)
def test_what_an_attribute_types_gets_a_cast(maker):
    """Every graph with torch.zeros and an index assignment has a ConstantOfShape."""
    square = np.eye(4, dtype=np.float32)
    model = model_of(
        [
            maker,
            helper.make_node("Add", ["x", "empty"], ["sum"]),
            helper.make_node("MatMul", ["sum", "w"], ["y"]),
        ],
        {"x": [4, 4]},
        {"y": [4, 4]},
        {"size": np.array([4, 4]), "square": square, "w": square},
    )
    to_half(model)
    onnx.checker.check_model(model, full_check=True)


def test_a_graph_that_fp16_cannot_type_stays_in_fp32(tmp_path):
    model = healthy("fp32", int8_attention=False)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 3
    stored("classifier.bias", [1e6, 0, 0])(model)  # a constant that FP16 does not hold
    onnx.save(model, tmp_path / "file.onnx")
    report = fix(tmp_path / "file.onnx", tmp_path / "out.onnx", FixOptions(engine=False))
    assert any(
        text.startswith("what is not INT8 stays in FP32, as with --compute keep: in FP16")
        for text in report.done
    )
    assert report.outputs.holds


def test_a_graph_that_took_too_long_is_not_run_in_other_batches(monkeypatch):
    calls = []

    def stopped(*_, **options):
        calls.append(options)
        raise UserError("the graph took over 120 s") from FutureTimeout()

    monkeypatch.setattr(runs, "_run", stopped)
    for run in (runs.run_fitting, lambda model, feeds: measure_ranges(model, ["y"], feeds)):
        calls.clear()
        with pytest.raises(UserError, match="took over"):
            run(onnx.ModelProto(), {"x": np.ones((8, 2), np.float32)})
        assert len(calls) == 1


def test_dynamic_quantization_in_fp16_is_mended(tmp_path):
    """FP16 scales times FP32 ones, which ONNX Runtime refuses: `check` offers `fix`."""
    path = write_dynamic(tmp_path, "dynamic.onnx", "fp16")
    with pytest.raises(UserError, match="ONNX Runtime cannot load"):
        run_batches(path, {name: value.astype(np.float16) for name, value in feeds().items()})
    assert "mixed-types" in offered(onnx.load(path))
    np.savez(tmp_path / "h.npz", **{name: value.astype(np.float16) for name, value in feeds().items()})
    report = fix(path, tmp_path / "out.onnx", FixOptions(inputs=tmp_path / "h.npz", engine=False))
    assert report.failures == []
    assert report.int8_after == 1  # the others read their weights through a Cast
    assert report.outputs.before_error is None


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (stored("/layer/query.weight_scale", 0), "bad-scale in 1 node .*/layer/query/weight/DQ"),
        (stored("/layer/query.bias", np.zeros(32), np.float16), "mixed-types in 1 node .*/layer/query/Add"),
    ],
)
def test_what_no_rewrite_knows_is_said_as_check_says_it(tmp_path, edit, told):
    model = healthy("fp32")
    edit(model)
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(UserError, match=told) as error:
        fix(tmp_path / "broken.onnx", tmp_path / "out.onnx", FixOptions(engine=False))
    row = check_model(model).errors[0]
    assert f"{row.why}; {row.fix}" in str(error.value)
    assert not (tmp_path / "out.onnx").exists()


def test_random_inputs_that_do_not_fit_are_said_in_words(tmp_path):
    """A table that random indices leave: what the runtime says, without its source, and the next step."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])
    at = helper.make_tensor_value_info("at", TensorProto.INT64, [4, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 8])
    far = helper.make_node("Mul", ["at", "hundred"], ["far"])
    node = helper.make_node("GatherElements", ["x", "far"], ["y"], name="/pick")
    hundred = helper.make_tensor("hundred", TensorProto.INT64, [], [100])
    graph = helper.make_graph([far, node], "g", [x, at], [y], [hundred])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "file.onnx",
    )
    with pytest.raises(UserError) as error:
        fix(tmp_path / "file.onnx", tmp_path / "out.onnx", FixOptions(engine=False))
    assert str(error.value).startswith("random inputs do not fit every graph, so give --inputs FILE.npz")
    assert "ONNX Runtime refuses GatherElements '/pick': GatherElements op: Out of range" in str(error.value)


def test_a_scale_below_zero_has_lost_nothing():
    """As 4-bit quantizers of ONNX Runtime write them: the codes times the scale are the weight."""
    model = healthy("fp32")
    stored("/layer/query.weight_scale", np.full(32, -0.01))(model)
    _, work = rewrite(model, FixOptions(), {}, [], left := [])
    assert left == []
    assert check_model(work).findings == []


def test_ranges_of_fp8_become_ranges_of_int8():
    model = healthy("fp32")
    zero = next(t for t in model.graph.initializer if t.name == "/layer/query/input.zero_point")
    zero.CopyFrom(helper.make_tensor(zero.name, TensorProto.FLOAT8E4M3FN, [], [0]))
    work, done, _ = mended(model)
    scale = next(t for t in work.graph.initializer if t.name == "/layer/norm0.out/int8/scale")
    assert onnx.numpy_helper.to_array(scale) == np.float32(0.02 * 448 / 127)
    assert "1 ranges of FP8 are ranges of INT8" in done


def test_an_output_without_a_shape_and_one_of_codes(tmp_path):
    model = healthy("fp32")
    q = helper.make_node("QuantizeLinear", [model.graph.output[0].name, "s", "z"], ["codes"], name="/out/Q")
    model.graph.node.append(q)
    model.graph.initializer.append(helper.make_tensor("s", TensorProto.FLOAT, [], [0.05]))
    model.graph.initializer.append(helper.make_tensor("z", TensorProto.INT8, [], [0]))
    model.graph.output.append(helper.make_tensor_value_info("codes", TensorProto.INT8, None))
    onnx.save(model, tmp_path / "file.onnx")
    assert check_file(tmp_path / "file.onnx", allow=("slow-weight-order",)).findings == []
    report = fix(tmp_path / "file.onnx", tmp_path / "out.onnx", FixOptions(engine=False, compute="keep"))
    assert [row.name for row in report.outputs.rows] == [value.name for value in model.graph.output]
    assert onnx.load(tmp_path / "out.onnx").graph.output[1].type.tensor_type.elem_type == TensorProto.INT8


def test_codes_that_are_scaled_by_hand_are_refused(tmp_path):
    """Without its Q the product would be of values: other outputs, and the reference has them too."""
    model = healthy("fp32")
    dq = next(n for n in model.graph.node if n.op_type == "DequantizeLinear" and "input" in n.name)
    cast = helper.make_node("Cast", [dq.input[0]], ["numbers"], name="/by_hand/Cast", to=TensorProto.FLOAT)
    product = helper.make_node("Mul", ["numbers", dq.input[1]], [*dq.output], name="/by_hand/Mul")
    at = [*model.graph.node].index(dq)
    nodes = [*model.graph.node[:at], cast, product, *model.graph.node[at + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, tmp_path / "file.onnx")
    with pytest.raises(UserError, match=r"/by_hand/Mul computes on the codes of .*use DequantizeLinear"):
        fix(tmp_path / "file.onnx", tmp_path / "out.onnx", FixOptions(engine=False))
    assert not (tmp_path / "out.onnx").exists()


def test_nodes_that_share_a_name_are_kept_apart():
    model = healthy("fp32")
    for node in model.graph.node:
        node.name = "same"
    work, _, left = mended(model, compute="keep")
    onnx.checker.check_model(work, full_check=True)
    assert left == []


def test_scales_in_half_precision_are_repaired_in_an_old_opset(tmp_path):
    case = next(case for case in CASES if case.code == "opset-too-low" and case.form == "factored")
    onnx.save(case.broken(), tmp_path / "file.onnx")
    report = fix(tmp_path / "file.onnx", tmp_path / "out.onnx", FixOptions(engine=False))
    assert (report.findings_before["opset-too-low"], report.findings_after) == (1, {})


def test_operators_of_other_domains_keep_a_graph_in_fp32():
    model = healthy("fp32")
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert to_half(model) == "operators of other domains may not run (LayerNormalization)"


def test_a_file_without_quantization_is_said_to_have_none():
    _, done, _ = mended(float_layer())
    assert done[-1].startswith("nothing in the file is quantized")


def test_a_graph_that_the_runtime_cannot_load_needs_no_other_inputs(tmp_path):
    node = helper.make_node("Own", ["x"], ["y"], domain="own")
    model = model_of([node], {"x": [2, 2]}, {"y": [2, 2]})
    model.opset_import.append(helper.make_opsetid("own", 1))
    onnx.save(model, tmp_path / "file.onnx")
    with pytest.raises(UserError, match=r"cannot load the graph: .*own.*; outputs are compared in it"):
        fix(tmp_path / "file.onnx", tmp_path / "out.onnx", FixOptions(engine=False))


def written(folder, nodes, **constants):
    """A linear of INT8 codes w [K, N] whose input has Q/DQ, as `nodes` make y of xd; and samples for it."""
    rng = np.random.default_rng(0)
    own = {"xs": np.float32(0.03), "xz": np.int8(0), "s": np.linspace(0.001, 0.05, 32, dtype=np.float32)}
    own |= {"w": rng.integers(-127, 128, (32, 32)).astype(np.int8), "z": np.zeros(32, np.int8)}
    pair = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
    ]
    shape = {"x": ["n", 32]}, {"y": ["n", 32]}
    onnx.save(model_of([*pair, *nodes], *shape, own | constants), folder / "file.onnx")
    return {"x": rng.standard_normal((8, 32)).astype(np.float32)}


WEIGHT = helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wd"], axis=1)
ODD = {
    "turned codes": [
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("DequantizeLinear", ["wt", "s", "z"], ["wd"], axis=1),
        helper.make_node("MatMul", ["xd", "wd"], ["y"]),
    ],
    "a factor": [
        helper.make_node("Mul", ["xd", "f"], ["xf"]), WEIGHT, helper.make_node("MatMul", ["xf", "wd"], ["y"]),
    ],
    "a divisor": [
        helper.make_node("Div", ["xd", "f"], ["xf"]), WEIGHT, helper.make_node("MatMul", ["xf", "wd"], ["y"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("nodes", ODD.values(), ids=ODD)
def test_what_stands_between_codes_and_product_changes_no_answer(nodes, tmp_path):
    samples = written(tmp_path, nodes, f=np.float32(-8))
    options = FixOptions(inputs=samples, engine=False, compute="keep")
    report = fix(tmp_path / "file.onnx", tmp_path / "out.onnx", options)
    assert (report.failures, report.int8_after) == ([], 1)
    assert report.outputs.difference < 1e-5


def test_values_have_the_type_that_a_dq_makes(tmp_path):
    made = helper.make_node(
        "DequantizeLinear", ["w", "s", "z"], ["y"], axis=1, output_dtype=TensorProto.FLOAT16
    )
    written(tmp_path, [made])
    remove_qdq(model := onnx.load(tmp_path / "file.onnx"))
    assert [t.data_type for t in model.graph.initializer] == [TensorProto.FLOAT16]


def test_codes_that_are_read_with_two_scales_are_refused(tmp_path):
    turned, one, product = ODD["turned codes"]
    two = helper.make_node("DequantizeLinear", ["wt", "xs", "xz"], ["wd2"])
    nodes = [turned, one, two, helper.make_node("Add", ["wd", "wd2"], ["sum"]), product]
    product.input[1] = "sum"
    samples = written(tmp_path, nodes)
    with pytest.raises(UserError, match="codes 'w' are read with two scales"):
        fix(tmp_path / "file.onnx", tmp_path / "out.onnx", FixOptions(inputs=samples, engine=False))


def test_a_gemm_that_stays_in_floating_point_is_said(tmp_path):
    samples = written(
        tmp_path, [WEIGHT, helper.make_node("Gemm", ["xd", "wd"], ["y"], "/pooler/Gemm", alpha=0.5)]
    )
    options = FixOptions(inputs=samples, engine=False, compute="keep")
    report = fix(tmp_path / "file.onnx", tmp_path / "out.onnx", options)
    assert (report.int8_before, report.int8_after) == (1, 0)
    assert report.failures[0].startswith("1 GEMMs are floating point now (pooler), ")


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_gemm_on_codes_keeps_its_channels_and_its_bias(alpha, tmp_path):
    """ONNX Runtime's QGemm of a PyTorch pooler: weights [N, K], and a bias in steps of alpha, x and w."""
    rng = np.random.default_rng(0)
    given = {"xs": np.float32(0.03), "z": np.int8(0), "s": np.linspace(0.001, 0.05, 32, dtype=np.float32)}
    given |= {"w": rng.integers(-127, 128, (32, 32)).astype(np.int8), "zs": np.zeros(32, np.int8)}
    given["b"] = rng.integers(-9999, 9999, 32).astype(np.int32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "z"], ["xq"]),
        helper.make_node(
            "QGemm",
            ["xq", "xs", "z", "w", "s", "zs", "b"],
            ["y"],
            domain="com.microsoft",
            transB=1,
            alpha=alpha,
        ),
    ]
    model = model_of(nodes, {"x": ["n", 32]}, {"y": ["n", 32]}, given)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "file.onnx")
    samples = {"x": rng.standard_normal((8, 32)).astype(np.float32)}
    options = FixOptions(inputs=samples, engine=False, compute="keep")
    report = fix(tmp_path / "file.onnx", tmp_path / "out.onnx", options)
    assert report.int8_after == (alpha == 1)
    assert report.outputs.difference < 0.01


@pytest.mark.parametrize("form", ["fp32", "fp16"])
def test_scales_are_factored_in_graphs_of_both_types(form):
    work, done, _ = mended(healthy(form), weights="factored")
    assert "scales of weights are a scalar in the DQ and a Mul after the MatMul" in done
    stored = {t.name: t for t in work.graph.initializer}
    assert not stored["/layer/query/MatMul/weight_scalar"].dims
    onnx.checker.check_model(work, full_check=True)
    codes = [node.input[:2] for node in work.graph.node if node.op_type == "DequantizeLinear"]
    assert all(stored[scale].dims == [] for name, scale in codes if name in stored)


def test_layernorms_without_modules_in_their_names_stay_in_fp32():
    model = healthy("fp32", int8_attention=False)
    for number, each in enumerate(model.graph.node):
        each.name = f"node_{each.op_type}_{number}"  # as torch.export writes them
    work, done, _ = mended(model)
    assert any("LayerNorms in FP32" in text for text in done)
    norms = [node for node in work.graph.node if node.op_type == "LayerNormalization"]
    kinds = {t.name: t.data_type for t in work.graph.initializer}
    assert {kinds[name] for node in norms for name in node.input[1:]} == {TensorProto.FLOAT}


@pytest.mark.parametrize("value", [
    {"value_float": -1e9}, {"value_floats": [-1e9]}, {"value": helper.make_tensor("t", 1, [], [-1e9])},
], ids=lambda value: next(iter(value)))  # fmt: skip
def test_a_mask_is_found_in_each_form_of_a_constant(value):
    nodes = [
        helper.make_node("Constant", [], ["fill"], **value),
        helper.make_node("Cast", ["fill"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Add", ["x", "half"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["y"]),
    ]
    model = model_of(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, x=TensorProto.FLOAT16, y=TensorProto.FLOAT16)
    assert [row.code for row in check_model(model).findings] == ["constant-overflows-fp16"]
    assert finite_masks(model) == ["fill"]
    assert check_model(model).findings == []
    model.graph.node[2].input[1] = "fill"  # FP32 to an FP16 tensor
    assert [row.code for row in check_model(model).findings] == ["mixed-types"]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_was_fixed_can_be_fixed_again(form, tmp_path):
    """As with --weights factored the second time."""
    onnx.save(healthy(form), tmp_path / "0.onnx")
    for number, weights in enumerate(("channel", "factored", "factored")):
        options = FixOptions(engine=False, weights=weights)
        report = fix(tmp_path / f"{number}.onnx", tmp_path / f"{number + 1}.onnx", options)
        assert (report.failures, report.int8_after) == ([], 4)
        assert number == 0 or report.outputs.difference < 1e-3
