"""`fix` on every broken layer of `check`, and on what ONNX Runtime's quantizers write."""

import subprocess
import sys
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
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
make = helper.make_node
# What no rewrite can know: a bad scale's range, a mix's right type, a constant's lost value.
HOPELESS = {
    "mixed-types", "nan-constant", "invalid-onnx", "not-checked", "opset-too-low", "no-plain-form",
    "onnxruntime-operators", "operator-refused",
}  # fmt: skip
FEEDS = {name: np.concatenate([each[name] for each in samples()]) for name in ("x", "mask")}


def mended(model, **options):
    return rewrite(model, FixOptions(**options), {})[1:]


def fixed(folder, given, **options):
    """The report of `fix` on a model, or on a file."""
    path = given if isinstance(given, Path) else folder / "file.onnx"
    if path is not given:
        onnx.save(given, path)
    return fix(path, folder / "out.onnx", FixOptions(**{"engine": False} | options))


def constants(model):
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def codes_of(model):
    return {row.code for row in check_model(model).findings}


def offered(model):
    """Codes of findings for which `qdqbench fix` is named."""
    found = check_model(model).grouped()
    return {each.code for each in found if any(text.startswith("qdqbench fix") for text in each.fixes)}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_broken_layer_is_clean_afterwards(case):
    """Where it can be; and what `fix` is offered for it mends."""
    # a weight whose scale is bad has lost its values, and that of an activation its range alone
    hopeless = case.code in HOPELESS or (case.code == "bad-scale" and case.form == "fp32")
    told = offered(case.broken())
    if hopeless and not told:
        return
    work, done, left = mended(case.broken())
    report = check_model(work)
    assert not told & {*report.codes}
    if hopeless:
        return
    assert report.findings == []
    assert done
    # only attentions that cannot be whole, and inputs that have no scale, lose their INT8
    if case.code in {"bad-scale", "dynamic-scale"}:
        assert len(left) == 1
    elif not left and case.code not in ("partial-attention", "attention-head-size"):
        assert len(report.quantized) >= 5


def test_codes_and_scales_of_a_good_file_stay():
    model = healthy("fp16")
    work, _, left = mended(model)
    before, after = constants(model), constants(work)
    assert left == []
    assert np.array_equal(after["/layer/query/MatMul/weight_int8"].T, before["/layer/query.weight"])  # [N, K]
    assert np.array_equal(after["/layer/query/MatMul/weight_scale"], before["/layer/query.weight_scale"])
    int8 = {name for name, value in after.items() if value.dtype == np.int8}
    assert int8 >= {f"/layer/{name}/MatMul/weight_int8" for name in ("query", "key", "value", "output")}


def test_a_zero_point_of_128_changes_no_value():
    """UINT8 codes less 128 are the INT8 codes: outputs are those of the INT8 file."""
    plain, shifted = (healthy("fp32", int8_attention=False) for _ in range(2))
    for name in constants(shifted):
        if name.endswith("input.zero_point"):
            stored(name, 128, np.uint8)(shifted)
    work, done, left = mended(shifted, compute="keep")
    assert any("same codes less 128" in text for text in done)
    assert left == []
    assert check_model(work).errors == []
    (expected,), (made,) = (run_batches(model, samples()[0]) for model in (plain, work))
    for name, value in expected.items():
        assert np.allclose(made[name], value, atol=1e-5)


UINT8 = {"activation_type": QuantType.QUInt8}


@pytest.mark.parametrize(
    ("write", "refused", "int8"),
    [
        # zero points, LayerNorm and softmax in INT8, weights [K, N]
        (write_static, {"non-zero-zero-point", "quantized-layernorm"}, 5),
        (partial(write_static, per_channel=True, **UINT8), {"uint8"}, 5),
        (partial(write_static, quant_format=QuantFormat.QOperator, **UINT8), {"unsupported-op"}, 5),
        (write_dynamic, {"unsupported-op"}, 5),
        # FP16 scales times FP32 ones; the other weights are read through a Cast
        (partial(write_dynamic, form="fp16"), {"unsupported-op", "mixed-types"}, 1),
    ],
    ids=["static", "uint8", "qoperator", "dynamic", "dynamic in FP16"],
)
def test_formats_of_onnxruntime_become_int8(tmp_path, write, refused, int8):
    path = write(tmp_path, "file.onnx")
    kind = np.float16 if int8 == 1 else np.float32
    np.savez(tmp_path / "samples.npz", **{name: value.astype(kind) for name, value in FEEDS.items()})
    assert {row.code for row in check_file(path).errors} >= refused
    assert offered(onnx.load(path)) == codes_of(onnx.load(path))
    report = fixed(tmp_path, path, inputs=tmp_path / "samples.npz", engine=write is write_static)
    assert (report.findings_after, report.failures, report.left) == ({}, [], [])
    assert (report.int8_before, report.int8_after, report.linears) == (0, int8, 5)
    assert report.outputs.holds
    assert report.outputs.n == 4
    assert (report.outputs.before_error is None) == (int8 == 1)  # ONNX Runtime refuses the mix
    if report.engine_after is not None:  # TensorRT-RTX is installed
        assert report.engine_before.refused
        assert report.engine_after.refused is None
        assert report.engine_after.int8_gemms >= 4
    off = report.outputs.model_copy(update={"after_error": 2 * report.outputs.limit + 1})
    assert report.model_copy(update={"outputs": off}).failures


def test_dynamic_quantization_needs_samples_and_says_so(tmp_path):
    report = fixed(tmp_path, write_dynamic(tmp_path, "dynamic.onnx"))
    assert report.int8_after == 0
    assert "--inputs" in report.left[0]
    assert report.outputs.after_error < 0.01  # floating point, with the values of the codes


def test_samples_replace_scales_that_are_bad(tmp_path):
    model = healthy("fp32", int8_attention=False)
    stored("/layer/query/input.scale", 0.0)(model)
    report = fixed(tmp_path, model, inputs=FEEDS, max_error=1.0)
    assert (report.left, report.findings_after, report.int8_after) == ([], {}, 4)


def test_calibration_sees_no_padding():
    """The largest value of a tensor is that of the tokens that a mask keeps."""
    casts = {"ids": "values", "attention_mask": "out"}
    nodes = [make("Cast", [name], [to], to=TensorProto.FLOAT) for name, to in casts.items()]
    inputs = dict.fromkeys(casts, ("batch", "length"))
    model = model_of(nodes, inputs, {"out": None}, **dict.fromkeys(casts, TensorProto.INT64))
    tokens = np.array([[1, 2, 99, 99], [3, 4, 5, 99]])
    kept = np.array([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert measure_ranges(model, ["values"], {"ids": tokens, "attention_mask": kept}) == {"values": 5.0}


# What cannot be fixed.


def endless():
    """A Loop of 2^62 rounds."""
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=[1])
    flag = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "on")]
    count = helper.make_tensor_value_info("round", TensorProto.INT64, [])
    body = [make("Identity", ["go"], ["on"]), make("Identity", ["a"], ["b"])]
    inner = helper.make_graph(body, "body", [count, flag[0], value("a")], [flag[1], value("b")])
    loop = make("Loop", ["rounds", "", "x"], ["y"], body=inner)
    return model_of([loop], {"x": [1]}, {"y": [1]}, {"rounds": np.array(1 << 62)})


def scaled_by_hand():
    """Without its Q the product would be of values: other outputs, and the reference has them too."""
    model = healthy("fp32")
    dq = next(n for n in model.graph.node if n.op_type == "DequantizeLinear" and "input" in n.name)
    cast = make("Cast", [dq.input[0]], ["numbers"], name="/by_hand/Cast", to=TensorProto.FLOAT)
    product = make("Mul", ["numbers", dq.input[1]], [*dq.output], name="/by_hand/Mul")
    nodes = [new for n in model.graph.node for new in ((cast, product) if n is dq else (n,))]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def far_index():
    """A table that random indices leave."""
    nodes = [make("Mul", ["at", "far"], ["row"]), make("GatherElements", ["x", "row"], ["y"], name="/pick")]
    shapes = {"x": [4, 8], "at": [4, 8]}
    return model_of(nodes, shapes, {"y": [4, 8]}, {"far": np.array(100)}, at=TensorProto.INT64)


def own_operator():
    model = model_of([make("Own", ["x"], ["y"], domain="own")], {"x": [2, 2]}, {"y": [2, 2]})
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


def edited(*edit):
    model = healthy("fp32")
    stored(*edit)(model)
    return model


LOST, MIXED = ("/layer/query.weight_scale", 0), ("/layer/query.bias", np.zeros(32), np.float16)
X = np.zeros((2, 4, 32), np.float32)
MASK = np.zeros((1, 1, 1, 4), np.float32)
RANDOM = r"^random inputs do not fit every graph, so give --inputs FILE\.npz.*"
UNFIXABLE = (
    {  # a model, what is said, and samples
        "lost weight": (partial(edited, *LOST), "bad-scale in 1 node .*/layer/query/weight/DQ"),
        "mixed types": (partial(edited, *MIXED), "mixed-types in 1 node .*/layer/query/Add"),
        "endless": (endless, r"took over 0\.5 s for one batch"),
        "by hand": (scaled_by_hand, "/by_hand/Mul computes on the codes of .*use DequantizeLinear"),
        "far index": (
            far_index,
            RANDOM + "ONNX Runtime refuses GatherElements '/pick': GatherElements op: Out of",
        ),
        "own operator": (own_operator, "cannot load the graph: .*own.*; outputs are compared in it"),
        "no mask": (float_layer, "no array for mask", {"x": X}),
        "one mask": (float_layer, "different numbers", {"x": X, "mask": MASK}),
        "other shape": (float_layer, "refuses", {"x": X[:1, 0], "mask": MASK}),
        "pickle": (float_layer, "cannot read", {"x": np.array([{"a": 1}], dtype=object), "mask": MASK}),
    }
    | {
        name: (case.broken, "cannot be fixed: ")
        for name, case in zip(IDS, CASES, strict=True)
        if case.code == "invalid-onnx" or (case.code == "mixed-types" and case.is_refused)
    }
)


@pytest.mark.parametrize("case", UNFIXABLE.values(), ids=UNFIXABLE)
def test_what_cannot_be_fixed_is_a_sentence_and_nothing_is_written(case, tmp_path, monkeypatch):
    broken, told, *arrays = case
    monkeypatch.setattr(runs, "BATCH_SECONDS", 0.5 if broken is endless else runs.BATCH_SECONDS)
    onnx.save(broken(), tmp_path / "file.onnx")
    inputs = tmp_path / "samples.npz" if arrays else None
    if arrays:
        np.savez(inputs, **arrays[0])
    before = {*tmp_path.iterdir()}
    with pytest.raises(UserError, match=told) as error:
        fixed(tmp_path, tmp_path / "file.onnx", inputs=inputs)
    assert {*tmp_path.iterdir()} == before
    if " in 1 node " in told:  # as `check` says it
        row = check_model(broken()).errors[0]
        assert f"{row.why}; {row.fix}" in str(error.value)


def test_the_file_itself_is_not_overwritten(tmp_path):
    onnx.save(float_layer(), tmp_path / "out.onnx")
    with pytest.raises(UserError, match="the file itself"):
        fixed(tmp_path, tmp_path / "out.onnx")


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
        model.graph.node.append(make(operator, inputs, made, domain=domain))
        model.opset_import.append(helper.make_opsetid("other", 1))
        codes = {row.code for row in check_model(model).findings}
        assert codes & {"invalid-onnx", "onnxruntime-operators", "not-checked"}
        if "invalid-onnx" not in codes:
            mended(model)


MADE = {  # an output of x: the nodes that make it
    "wide": [make("Mul", ["x", "big"], ["wide"])],
    "logits": [make("Mul", ["x", "scale"], ["logits"])],
    "ids": [
        make("Mul", ["x", "scale"], ["product"]),
        make("Cast", ["product"], ["ids"], to=TensorProto.INT64),
    ],
    "found": [
        make("Mul", ["x", "scale"], ["scaled"]),
        make("Greater", ["scaled", "half"], ["over"]),
        make("Reshape", ["over", "all"], ["flat"]),
        make("Compress", ["scaled", "flat"], ["found"]),
    ],
}


@pytest.mark.parametrize(
    ("other", "scales", "worst", "error"),  # scales: before, after, of the reference
    [
        # one norm over both would be 0.003: the wide output is a hundred times as large
        ("logits", (1.0, 0.7, 1.0), ("logits", False, 0.1, 0), 0.3),
        ("logits", (0.02, 0.02, 1.0), ("logits", False, 0.5, 0), 0.98),  # it was wrong before
        ("ids", (3.0, 3.0, 3.0), ("wide", True, 0.1, 0), 0.0),
        ("ids", (3.0, 9.0, 3.0), ("ids", False, 0.1, 0), None),  # integers are equal or not
        ("found", (1.0, 1.0, 1.0), ("wide", True, 0.1, 0), 0.0),
        ("found", (1.0, 0.6, 1.0), ("found", False, 0.1, 4), None),  # of another length in each batch
    ],
)
def test_each_output_is_compared_on_its_own_and_the_worst_decides(other, scales, worst, error, tmp_path):
    """Files of 100 x and of a second output, x times a scale."""
    models = []
    for scale in scales:
        given = {"big": np.float32(100), "scale": np.float32(scale), "half": np.float32(0.5), "all": [-1]}
        outputs = {"wide": None, other: None}
        nodes = [node for name in outputs for node in MADE[name]]
        models.append(model_of(nodes, {"x": ["n", 4]}, outputs, given, ids=TensorProto.INT64))
    before, after = tmp_path / "before", tmp_path / "after"
    onnx.save(models[0], before)
    onnx.save(models[1], after)
    feeds = {"x": np.random.default_rng(0).uniform(0, 1, (16, 4)).astype(np.float32)}
    found = compare_outputs(before, models[2], after, feeds, inputs="given", limit=0.1)
    assert (found.name, found.holds, found.limit, found.other_lengths) == worst
    assert [row.holds for row in found.rows] == [True, worst[1]]
    if error is None:
        assert 0.1 < found.after_error <= 1
    else:
        assert found.after_error == pytest.approx(error, rel=1e-5)
    assert found.largest == 0.0 or other != "ids"


def test_samples_that_share_no_batch_are_run_as_they_were_given():
    """A graph may compute a size from all of its samples, as one with words and spans does."""
    sized = model_of(
        [
            make("ReduceMax", ["n"], ["longest"], keepdims=1),
            make("Concat", ["minus", "longest"], ["shape"], axis=0),
            make("Reshape", ["x", "shape"], ["y"]),
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
        make("ConstantOfShape", ["size"], ["empty"]),
        make("EyeLike", ["square"], ["empty"]),
        make("RandomNormal", [], ["empty"], shape=[4, 4], seed=1.0),
        make("RandomUniformLike", ["x"], ["empty"], seed=1.0),
    ],
    ids=lambda node: node.op_type,
)
def test_what_an_attribute_types_gets_a_cast(maker):
    """Every graph with torch.zeros and an index assignment has a ConstantOfShape."""
    square = np.eye(4, dtype=np.float32)
    model = model_of(
        [
            maker,
            make("Add", ["x", "empty"], ["sum"]),
            make("MatMul", ["sum", "w"], ["y"]),
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
    report = fixed(tmp_path, model)
    assert "what is not INT8 stays in FP32, as with --compute keep: in FP16" in " ".join(report.done)
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


def test_a_scale_below_zero_has_lost_nothing():
    """As 4-bit quantizers of ONNX Runtime write them: the codes times the scale are the weight."""
    work, _, left = mended(edited("/layer/query.weight_scale", np.full(32, -0.01)))
    assert left == []
    assert check_model(work).findings == []


def test_ranges_of_fp8_become_ranges_of_int8():
    model = healthy("fp32")
    zero = next(t for t in model.graph.initializer if t.name == "/layer/query/input.zero_point")
    zero.CopyFrom(helper.make_tensor(zero.name, TensorProto.FLOAT8E4M3FN, [], [0]))
    work, done, _ = mended(model)
    assert constants(work)["/layer/norm0.out/int8/scale"] == np.float32(0.02 * 448 / 127)
    assert "1 ranges of FP8 are ranges of INT8" in done


def test_an_output_without_a_shape_and_one_of_codes(tmp_path):
    model = healthy("fp32")
    q = make("QuantizeLinear", [model.graph.output[0].name, "s", "z"], ["codes"], name="/out/Q")
    model.graph.node.append(q)
    model.graph.initializer.append(helper.make_tensor("s", TensorProto.FLOAT, [], [0.05]))
    model.graph.initializer.append(helper.make_tensor("z", TensorProto.INT8, [], [0]))
    model.graph.output.append(helper.make_tensor_value_info("codes", TensorProto.INT8, None))
    assert check_model(model, allow=("slow-weight-order",)).findings == []
    report = fixed(tmp_path, model, compute="keep")
    assert [row.name for row in report.outputs.rows] == [value.name for value in model.graph.output]
    assert onnx.load(tmp_path / "out.onnx").graph.output[1].type.tensor_type.elem_type == TensorProto.INT8


def test_nodes_that_share_a_name_are_kept_apart():
    model = healthy("fp32")
    for node in model.graph.node:
        node.name = "same"
    work, _, left = mended(model, compute="keep")
    onnx.checker.check_model(work, full_check=True)
    assert left == []


def test_scales_in_half_precision_are_repaired_in_an_old_opset(tmp_path):
    case = next(case for case in CASES if case.code == "opset-too-low" and case.form == "factored")
    report = fixed(tmp_path, case.broken())
    assert (report.findings_before["opset-too-low"], report.findings_after) == (1, {})


def test_operators_of_other_domains_keep_a_graph_in_fp32():
    model = healthy("fp32")
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert to_half(model) == "operators of other domains may not run (LayerNormalization)"


def test_a_file_without_quantization_is_said_to_have_none():
    assert mended(float_layer())[1][-1].startswith("nothing in the file is quantized")


# A linear of INT8 codes w [K, N] whose input x has Q/DQ.

RNG = np.random.default_rng(0)
OWN = {
    "xs": np.float32(0.03), "xz": np.int8(0), "s": np.linspace(0.001, 0.05, 32, dtype=np.float32),
    "w": RNG.integers(-127, 128, (32, 32)).astype(np.int8), "z": np.zeros(32, np.int8),
    "b": RNG.integers(-9999, 9999, 32).astype(np.int32), "f": np.float32(-8),
}  # fmt: skip
VALUES = {"inputs": {"x": RNG.standard_normal((8, 32)).astype(np.float32)}, "compute": "keep"}
INPUT = (
    make("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
    make("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
)


def linear(*nodes):
    model = model_of([*INPUT, *nodes], {"x": ["n", 32]}, {"y": ["n", 32]}, OWN)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


WEIGHT = make("DequantizeLinear", ["w", "s", "z"], ["wd"], axis=1)
TURNED = (
    make("Transpose", ["w"], ["wt"], perm=[1, 0]),
    make("DequantizeLinear", ["wt", "s", "z"], ["wd"], axis=1),
)


@pytest.mark.parametrize(
    "nodes",
    [
        (*TURNED, make("MatMul", ["xd", "wd"], ["y"])),
        (make("Mul", ["xd", "f"], ["xf"]), WEIGHT, make("MatMul", ["xf", "wd"], ["y"])),
        (make("Div", ["xd", "f"], ["xf"]), WEIGHT, make("MatMul", ["xf", "wd"], ["y"])),
    ],
    ids=["turned codes", "a factor", "a divisor"],
)
def test_what_stands_between_codes_and_product_changes_no_answer(nodes, tmp_path):
    report = fixed(tmp_path, linear(*nodes), **VALUES)
    assert (report.failures, report.int8_after) == ([], 1)
    assert report.outputs.difference < 1e-5


def test_values_have_the_type_that_a_dq_makes():
    half = TensorProto.FLOAT16
    remove_qdq(model := linear(make("DequantizeLinear", ["w", "s", "z"], ["y"], axis=1, output_dtype=half)))
    assert [t.data_type for t in model.graph.initializer] == [half]


def test_codes_that_are_read_with_two_scales_are_refused(tmp_path):
    other = make("DequantizeLinear", ["wt", "xs", "xz"], ["wd2"])
    rest = make("Add", ["wd", "wd2"], ["sum"]), make("MatMul", ["xd", "sum"], ["y"])
    with pytest.raises(UserError, match="codes 'w' are read with two scales"):
        fixed(tmp_path, linear(*TURNED, other, *rest), **VALUES)


def test_a_gemm_that_stays_in_floating_point_is_said(tmp_path):
    gemm = make("Gemm", ["xd", "wd"], ["y"], "/pooler/Gemm", alpha=0.5)
    report = fixed(tmp_path, linear(WEIGHT, gemm), **VALUES)
    assert (report.int8_before, report.int8_after) == (1, 0)
    assert report.failures[0].startswith("1 GEMMs are floating point now (pooler), ")


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_gemm_on_codes_keeps_its_channels_and_its_bias(alpha, tmp_path):
    """ONNX Runtime's QGemm of a PyTorch pooler: weights [N, K], and a bias in steps of alpha, x and w."""
    given, options = ["xq", "xs", "xz", "w", "s", "z", "b"], {"transB": 1, "alpha": alpha}
    gemm = make("QGemm", given, ["y"], domain="com.microsoft", **options)
    report = fixed(tmp_path, linear(gemm), **VALUES)
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


FILL = -1e9


@pytest.mark.parametrize(
    "value",
    [{"value_float": FILL}, {"value_floats": [FILL]}, {"value": helper.make_tensor("t", 1, [], [FILL])}],
    ids=lambda value: next(iter(value)),
)
def test_a_mask_is_found_in_each_form_of_a_constant(value):
    nodes = [
        make("Constant", [], ["fill"], **value),
        make("Cast", ["fill"], ["half"], to=TensorProto.FLOAT16),
        make("Add", ["x", "half"], ["scores"]),
        make("Softmax", ["scores"], ["y"]),
    ]
    model = model_of(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, x=TensorProto.FLOAT16, y=TensorProto.FLOAT16)
    assert codes_of(model) == {"constant-overflows-fp16"}
    assert finite_masks(model) == ["fill"]
    assert codes_of(model) == set()
    model.graph.node[2].input[1] = "fill"  # FP32 to an FP16 tensor
    assert codes_of(model) == {"mixed-types"}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_was_fixed_can_be_fixed_again(form, tmp_path):
    """As with --weights factored the second time."""
    model = healthy(form)
    for number, weights in enumerate(("channel", "factored", "factored")):
        report = fixed(tmp_path, model, weights=weights)
        assert (report.failures, report.int8_after) == ([], 4)
        assert number == 0 or report.outputs.difference < 1e-3
        model = onnx.load(tmp_path / "out.onnx")
