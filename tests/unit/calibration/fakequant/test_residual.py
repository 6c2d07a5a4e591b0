"""INT8 residuals: they round as the linears that read the same tensor, all the way to the engine."""

import importlib.util
import itertools

import numpy as np
import pytest
from onnx import helper, numpy_helper

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.eval.selection.search.workspace import make_space
from qdqbench.eval.selection.sensitivity.measure import list_candidates
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.engine.build import build, require_int8
from qdqbench.quantize.engine.layers import float_residuals
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.graph import export
from qdqbench.quantize.graph.index import QDQ, GraphIndex, list_int8_norms, prune
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.lint.inspection import inspect_layers, read_graph
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.utils.errors import CheckFailed, UserError

from ....support import tiny_bert as bert
from ....support.tiny_modernbert import new_modernbert

PARTS = ("attention.output", "output")
ADDERS = [f"bert.encoder.layer.{n}.{name}" for n in range(bert.LAYERS) for name in PARTS]
READERS = {
    "bert.encoder.layer.0.attention.output": ["query", "key", "value"],
    "bert.encoder.layer.0.output": ["intermediate.dense"],
}
BATCHES = [bert.padded_batch((9, 4, 16)), bert.padded_batch((12, 12, 3, 7), seed=1)]
WAYS = {
    "plain": {},
    "smoothed": {"calibration": {"smoothing": 1.0, "bias_correction": True}},
    "attention": {"base": "bert-int8-attention", "calibration": {"method": "percentile/99.9"}},
}


def recipe_of(way, **changes):
    values = {"residual": "int8"} | WAYS[way] | changes
    return bert.recipe_with(values.pop("base", "bert-int8-linears"), **values)


@pytest.fixture(scope="module")
def made(tiny_bert):
    return {way: bert.calibrate(tiny_bert, recipe_of(way)) for way in WAYS}


@pytest.fixture(scope="module")
def graphs(made):
    """Finished graphs by way and compute precision; copy one to change it."""
    found = {}
    for way, (model, plan, _) in made.items():
        traced = export.trace(model, 20)
        for compute in ("fp32", "fp16"):
            settings = export.ExportSettings(20, compute, "factored")
            found[way, compute] = export.finish_graph(traced, plan, settings)
    return found


def expected(plan):
    return {*plan.int8, *plan.attention, *plan.residual}


def codes_of(findings):
    return {row.node: row.code for row in findings}


def unquantized(graph, module):
    """The graph whose residual of one module is added as it was before its Q."""
    broken = bert.copied(graph)
    index = GraphIndex(broken)
    dq = next(n for n in broken.graph.node if n.op_type == "DequantizeLinear" and _of(n, module))
    source = index.producers[dq.input[0]].input[0]
    for node in index.consumers[dq.output[0]]:
        node.input[list(node.input).index(dq.output[0])] = source
    prune(broken)
    return broken


def rescaled(graph, module, factor, kinds=QDQ):
    """The graph whose residual of one module has a scale of its own."""
    broken = bert.copied(graph)
    index = GraphIndex(broken)
    for node in broken.graph.node:
        if node.op_type in kinds and _of(node, module):
            scale = np.asarray(index.constant(node.input[1]) * np.float32(factor))
            broken.graph.initializer.append(numpy_helper.from_array(scale, f"{node.name}/own"))
            node.input[1] = f"{node.name}/own"
    return broken


def path_of(module):
    """The module in names of nodes."""
    return f"/{module.replace('.', '/').replace('layer/', 'layer.')}"


def _of(node, module):
    return node.name.startswith(f"{path_of(module)}/residual_quantizer")


NORMS = sorted(f"{path_of(name)}/LayerNorm/LayerNormalization" for name in ADDERS)


# recipe and plan


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"residual": "int8"}, ADDERS),
        ({"rules": [{"match": "*.0.output", "type": "Residual", "precision": "int8"}]}, ADDERS[1:2]),
        ({"residual": "int8", "rules": [{"match": "*.0.*", "precision": "fp16"}]}, ADDERS[2:]),
        (
            {"residual": "int8", "rules": [{"match": "encoder.layer.1.output", "precision": "fp32"}]},
            ADDERS[:3],
        ),
    ],
)
def test_which_residuals_are_int8(tiny_bert, changes, wanted):
    rules = [bert.EVERY, *changes.pop("rules", [])]
    plan = bert.plan_of(bert.recipe_with(rules=rules, **changes), load_model(str(tiny_bert)))
    assert list(plan.residual) == wanted
    assert all(plan.scaling[name] == plan.scaling[reader] for name in wanted for reader in _readers(name))


def _readers(name):
    layer = name.removesuffix(".attention.output").removesuffix(".output")
    inside = "attention.self." if name.endswith(".attention.output") else ""
    ends = READERS[name.replace(".1.", ".0.")]
    return [f"{layer}.{inside}{end}" for end in ends]


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"match": "*.0.attention.self.key", "precision": "fp16"}, "layer.0.attention.self.key to be INT8"),
        ({"match": "*.1.intermediate.dense", "precision": "fp16"}, "layer.1.intermediate.dense to be INT8"),
        ({"match": "*.value", "method": "mse"}, "layer.0.attention.output, .*1.attention.output to have one"),
        (
            {"match": "*.0.*.query", "smoothing": 0.5},
            "residual of bert.encoder.layer.0.attention.output to have",
        ),
    ],
)
def test_the_readers_of_an_int8_residual(tiny_bert, rule, why):
    rules = [bert.EVERY, rule]
    with pytest.raises(UserError, match=f"residual: int8 needs .*{why}.*type Residual"):
        bert.plan_of(bert.recipe_with(rules=rules, residual="int8"), load_model(str(tiny_bert)))


def test_streams_without_known_residuals_or_readers(tiny_bert):
    model = load_model(str(tiny_bert))
    table = {name: info for name, info in module_table(model).items() if info.kind != "Residual"}
    with pytest.raises(UserError, match="family bert has no place for a quantizer"):
        resolve(recipe_of("plain"), table, "bert")
    model = new_modernbert()
    recipe = bert.recipe_with("modernbert-int8-linears", residual="int8")
    with pytest.raises(UserError, match="family modernbert normalizes first: no linear reads"):
        resolve(recipe, module_table(model), model.base_model_prefix)


@pytest.mark.parametrize("start", [list_candidates, make_space])
def test_what_moves_single_linears_refuses_int8_residuals(tiny_bert, start):
    model = load_model(str(tiny_bert))
    with pytest.raises(UserError, match="set residual: fp16 in a copy of the recipe"):
        start(recipe_of("plain"), module_table(model), "bert")


# fake-quant


@pytest.mark.parametrize("way", WAYS)
def test_a_residual_is_rounded_as_its_readers_round_it(made, way):
    model, plan, record = made[way]
    assert list(plan.residual) == ADDERS
    found = set(quantizers.list_quantizers(model))
    assert {n for n in found if "residual_quantizer" in n} == {f"{n}.residual_quantizer" for n in ADDERS}
    for name in ADDERS:
        state = record.quantizers[f"{name}.residual_quantizer"]
        assert (state.kind, state.axis) == ("residual", None)
        for reader in _readers(name):
            own = model.get_submodule(f"{name}.residual_quantizer")
            other = model.get_submodule(f"{reader}.input_quantizer")
            assert state.amax == record.quantizers[f"{reader}.input_quantizer"].amax
            assert (own.pre_quant_scale is None) == (other.pre_quant_scale is None) == (way != "smoothed")
            if own.pre_quant_scale is not None:
                assert own.pre_quant_scale.equal(other.pre_quant_scale)
                assert own.pre_quant_scale.unique().numel() > 1


@pytest.mark.parametrize("way", WAYS)
def test_what_a_layernorm_adds_is_rounded(made, way):
    model = made[way].model
    for name in ADDERS:
        quantizer = model.get_submodule(name).residual_quantizer
        read, output = [f"{name}.LayerNorm", f"{name}.residual_quantizer"], [f"{name}.dense"]
        with bert.watched(model, read, inputs=True) as seen, bert.watched(model, output) as given:
            quantizers.forward(model, BATCHES[0])
        (total,), (plain,), (dense,) = *seen.values(), *given.values()
        factors = 1 if quantizer.pre_quant_scale is None else quantizer.pre_quant_scale
        scale = quantizer.amax / 127
        wanted = (plain * factors / scale).round().clamp(-128, 127) * scale / factors
        assert (total - dense - wanted).abs().max() < 1e-5
        assert (total - dense - plain).abs().max() > 1e-3  # so the rounding shows


def test_smoothing_changes_nothing_without_rounding(tiny_bert, made):
    plain, model = load_model(str(tiny_bert)), load_model(str(tiny_bert))
    record = made["smoothed"].record.model_copy(update={"biases": {}})
    ptq.restore(model, made["smoothed"].plan, record)
    with quantizers.quantizers_off(model):
        assert quantizers.forward(model, BATCHES[0]).equal(quantizers.forward(plain, BATCHES[0]))


def test_restored_bit_for_bit_and_without_traces(tiny_bert, made):
    for each in made.values():
        bert.restored(each, load_model(str(tiny_bert)))
    plain = bert.calibrate(tiny_bert, bert.recipe_with()).model
    assert not [name for name, _ in plain.named_modules() if "residual" in name]


@pytest.mark.parametrize(("reader", "adder"), [(bert.LINEARS[1], PARTS[0]), (bert.LINEARS[4], PARTS[1])])
def test_scales_that_went_apart_are_refused(tiny_bert, made, reader, adder):
    _, plan, record = made["plain"]
    broken = record.model_copy(deep=True)
    broken.quantizers[f"{reader}.input_quantizer"].amax *= 1.5
    with pytest.raises(CheckFailed, match=rf"need one amax.*: bert\.encoder\.layer\.0\.{adder}\.residual_q"):
        ptq.restore(load_model(str(tiny_bert)), plan, broken)


# graph, check and parity


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
@pytest.mark.parametrize("way", WAYS)
def test_graph_and_check(made, graphs, way, compute):
    model, plan, _ = made[way]
    graph = graphs[way, compute]
    report = check_model(graph, expected_quantized=expected(plan))
    assert report.findings == []
    assert sorted(report.residual_quantized) == sorted(list_int8_norms(graph)) == NORMS
    index = GraphIndex(graph)
    for name in ADDERS:
        mine = [n for n in graph.graph.node if n.op_type == "QuantizeLinear" and _of(n, name)]
        assert len(mine) == 1
        same = [
            n
            for n in index.consumers[mine[0].input[0]]
            if n.op_type == "QuantizeLinear"
            and index.constant(n.input[1]) == index.constant(mine[0].input[1])
        ]
        assert len(same) == 1 + len(_readers(name))
    for batch in BATCHES:
        wanted = quantizers.forward(model, batch).numpy()
        tolerance = 0.02 if compute == "fp32" else 0.2  # a border value may be rounded to two codes
        np.testing.assert_allclose(bert.run_onnx(graph, batch), wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("way", WAYS)
def test_check_finds_what_the_residual_lacks(made, graphs, way):
    plan, graph = made[way].plan, graphs[way, "fp16"]
    add = "/bert/encoder/layer.1/attention/output/Add"
    broken = unquantized(graph, ADDERS[2])
    found = check_model(broken, expected_quantized=expected(plan)).findings
    assert codes_of(found) == {add: "recipe-missing"}
    own = rescaled(graph, ADDERS[2], 1.25)
    assert codes_of(check_model(own, expected_quantized=expected(plan)).findings) == {add: "split-residual"}
    fewer = expected(plan) - {ADDERS[2]}
    assert codes_of(check_model(graph, expected_quantized=fewer).findings) == {add: "recipe-surplus"}
    stray = check_model(graph).findings
    assert {row.code for row in stray} == {"quantized-residual"}
    assert len(stray) == len(ADDERS)
    lost = check_model(graph, expected_quantized={*expected(plan), "bert.encoder.layer.7.output"}).findings
    assert codes_of(lost) == {"bert.encoder.layer.7.output": "recipe-missing"}


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
@pytest.mark.parametrize("way", WAYS)
def test_parity(made, graphs, way, compute):
    model, graph = made[way].model, graphs[way, compute]
    parity = compare_layers(graph, model, BATCHES)
    assert [row.name for row in parity.rows if not row.holds] == []
    assert {row.name for row in parity.rows} >= {f"{name}.residual" for name in ADDERS}
    assert parity.logits_max_abs_diff < 0.05
    following = "bert.encoder.layer.1.attention.output.residual"  # what the LayerNorm behind it makes
    for broken in (unquantized(graph, ADDERS[1]), rescaled(graph, ADDERS[1], 1.25)):
        bad = [row.name for row in compare_layers(broken, model, BATCHES).rows if not row.holds]
        assert following in bad
        assert all(".layer.1.attention" in name for name in bad)


def test_a_border_value_is_no_fault_of_the_graph(made, graphs):
    """ModelOpt and ONNX may round it to two codes; a LayerNorm shows that step, and no linear averages it.

    Here the Q alone has another scale, so that values near a border change their code, and codes do not.
    """
    graph = rescaled(graphs["plain", "fp32"], ADDERS[1], 1.003, ("QuantizeLinear",))
    assert compare_layers(graph, made["plain"].model, BATCHES).passed


# engine


def row(*inputs, norm=NORMS[0], kind="kgen", copy=0):
    return LayerRow(
        name=f"__myl_AddMeanSub_myl{copy}_1",
        kind=kind,
        onnx=["/x/Add", norm],
        inputs=list(inputs),
        constants=["Half"],
        outputs=["Int8"],
    )


@pytest.mark.parametrize(
    ("rows", "lost"),
    [
        ([row("Half", "Int8")], []),
        ([row("Int8", "Float")], []),
        ([row("Half", "Half")], NORMS[:1]),
        ([row("Half", "Float")], NORMS[:1]),
        ([], NORMS[:1]),
        ([row("Half", "Int8", norm=NORMS[1])], NORMS[:1]),
        ([row("Half", "Int8"), row("Half", "Half", copy=1)], NORMS[:1]),  # one of two profiles
        ([row("Half"), row("Half", "Int8")], []),  # the statistics in a kernel of their own
        ([row("Int8", kind="gemm")], NORMS[:1]),  # that is what it multiplies
        ([row("Int8", "Int8", kind="gemm")], []),
    ],
)
def test_which_kernels_read_a_residual_as_int8(rows, lost):
    assert float_residuals(rows, NORMS[:1]) == lost


@pytest.fixture
def built(tmp_path):
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt_rtx is not installed")

    def run(graph, plan):
        path = tmp_path / "x.onnx"
        export.save(graph, path, "x")
        names = [f"{path_of(name)}/MatMul" for name in plan.int8]
        return path, build(
            path,
            tmp_path / "x.engine",
            backend="tensorrt_rtx",
            profiles=[Profile((1, 16), (2, 16), (4, 32))],
            expected_gemms=names,
            expected_attention=len(plan.attention),
        )

    return run


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_reads_int8(made, graphs, built, way):
    _, result = built(bert.copied(graphs[way, "fp16"]), made[way].plan)
    assert (result.int8_residuals, result.expected_int8_residuals) == (len(ADDERS), len(ADDERS))
    assert result.not_int8_residuals == []
    require_int8(result)
    between = [r for r in result.layers if {*NORMS[:-1]} & {*r.onnx} and "Int8" in r.inputs]
    assert len(between) == len(ADDERS) - 1
    assert all(r.outputs == ["Int8"] for r in between)  # nothing else leaves the LayerNorm


def test_float_residuals_fail_the_proof(made, graphs, built):
    plan = made["plain"].plan
    path, result = built(rescaled(graphs["plain", "fp16"], ADDERS[2], 1.25), plan)
    lost = ["/bert/encoder/layer.1/attention/output/LayerNorm/LayerNormalization"]
    assert (result.int8_residuals, result.not_int8_residuals) == (len(ADDERS) - 1, lost)
    with pytest.raises(CheckFailed, match="1 of 4 LayerNorms do not read their INT8 residual as INT8"):
        require_int8(result)
    with pytest.raises(CheckFailed, match="as INT8, which no runtime for CPUs does; on a CPU take a recipe"):
        require_int8(result.model_copy(update={"backend": "openvino"}))
    judged = inspect_layers(result.layers, read_graph(path), expected=[])
    assert judged.not_int8_residuals == lost
    assert any("1 of 4 LayerNorms do not read" in line for line in judged.failures)


def test_a_graph_without_them_expects_none(tiny_bert, made):
    graph = bert.exported(tiny_bert, weights="factored")
    assert list_int8_norms(graph) == []
    missing = check_model(graph, expected_quantized=expected(made["plain"].plan)).findings
    assert sorted(row.node for row in missing) == sorted(f"{path_of(name)}/Add" for name in ADDERS)


def test_a_chain_without_end_is_not_followed():
    names = [f"x{n}" for n in range(200)]
    nodes = [helper.make_node("Cast", [a], [b], to=1) for a, b in itertools.pairwise(names)]
    nodes += [
        helper.make_node("Add", [names[-1], names[-1]], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "gain"], ["out"], name="norm"),
    ]
    assert list_int8_norms(helper.make_model(helper.make_graph(nodes, "g", [], []))) == []
