"""Plans of every family, recipe and head: all nodes covered, and the answers of ONNX Runtime."""

import itertools
import json
import time
from collections import Counter
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import onnx
import pytest

from qdqbench.quantize.engine.cuda import check
from qdqbench.quantize.engine.cuda.interpret import interpret
from qdqbench.quantize.engine.cuda.match import FAMILIES, match_graph
from qdqbench.quantize.engine.cuda.names import ATTENTION_SIZES
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.engine.cuda.plan import Answer, Plan, Quantize, Tensor, parse
from qdqbench.quantize.engine.cuda.runtime import CudaEngine
from qdqbench.quantize.models.families import known
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import MOST_KERNEL_HEAD

from ....support import families
from ....support.cuda_boundaries import compare_boundaries, require_boundaries, run_outputs
from ....support.cuda_graphs import CASES, HEADS, LIKE_ROBERTA, RECIPES, batch_for, write_head
from ....support.draws import require_alike
from ....support.long import mark_long

LENGTHS = [(9, 4, 16), (1,), (64, 5)]
NOT_COVERED = ["deberta-v2"]


def _with_long(cases):
    """A graph does not tell QAT from PTQ, `-residual-fused` has all of `-residual`, XLM-R is as RoBERTa.

    Layers of another family are as BERT's: what is its own is in each of its graphs.
    """
    again = ("-qat", "-residual"), ("-qat", "-residual", "-fp16", "-ffn", "-linears")
    long = [case for case in cases if case[-1].endswith(again[case[0] != "bert"]) or case[0] in LIKE_ROBERTA]
    return mark_long(cases, long)


@pytest.fixture(params=_with_long([*CASES, *((head,) for head in HEADS)]), ids="-".join)
def graph(request, graph_of):
    return graph_of(*request.param)


def test_every_node_is_covered_once_in_order(graph):
    plan, _ = pack(match_graph(graph))
    covered = [name for operation in plan.operations for name in operation.nodes]
    assert Counter(covered) == Counter(node.name for node in graph.graph.node)
    assert parse(Plan, json.loads(json.dumps(asdict(plan)))) == plan


def test_answers_are_those_of_the_graph(graph, monkeypatch):
    """In FP32 nothing but the order of sums differs; FP16 tensors move codes next to a rounding border."""
    for half, tolerance in ((np.float32, 1e-4), (np.float16, 0.2)):
        monkeypatch.setattr(check, "HALF", np.dtype(half))
        plan, arrays = pack(match_graph(graph))

        def answer(name, lengths, seed, plan=plan, arrays=arrays):
            batch = batch_for(graph, lengths, seed)
            wanted, found = run_outputs(graph, batch), interpret(plan, arrays, batch)
            assert found.keys() == wanted.keys()
            assert found[name].dtype == np.float32
            exact = wanted[name]
            places = (*batch["attention_mask"].shape, *[1] * (exact.ndim - 2))
            by_token = plan.head.pooling == "tokens"
            return found[name], exact * batch["attention_mask"].reshape(places) if by_token else exact

        for lengths, output in itertools.product(LENGTHS, graph.graph.output):
            require_alike(partial(answer, output.name, lengths), tolerance)


@pytest.mark.long
@pytest.mark.usefixtures("in_fp32")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("model_type", [each for each in RECIPES if each != "bert"])
def test_every_head_of_every_family_is_made_by_kernels_as_by_its_graph(
    model_type, head, tmp_path, monkeypatch
):
    """Each kernel is fed by the graph, with rows of up to 512 tokens: codes differ next to borders alone."""
    sizes = families.SIZES[model_type] | {"max_position_embeddings": 514}
    monkeypatch.setitem(families.SIZES, model_type, sizes)
    write_head(tmp_path, head, model_type)
    graph = onnx.load(tmp_path / "model.onnx")
    require_boundaries(graph, *pack(match_graph(graph)), batch_for(graph, (512, 9, 3)))


GRAPHS = ("attention", "residual", "residual-fused", "attention fixed")
WIDE = [*itertools.product((24, 26, 32, 56, 64, 96, 128), GRAPHS)]
FEW = WIDE[::3]  # of each size one or two, and of each graph


@pytest.mark.parametrize("case", mark_long(WIDE, {*WIDE} - {*FEW}), ids=str)
@pytest.mark.usefixtures("in_fp32")
def test_heads_and_widths_of_any_size_are_made_as_by_the_graph(case, graph_of):
    """As above: BERT's other graphs have rows of up to 128 tokens."""
    head_size, recipe = case
    graph = graph_of(f"bert-int8-{recipe}", head_size)
    plan, arrays = pack(match_graph(graph))
    wide = next(each for each in ATTENTION_SIZES if each >= head_size)
    assert {each.head_size for each in plan.attentions} == {wide}
    check.require_kernels(plan)  # of 52 channels and 100 between linears too, where heads have 26
    assert ATTENTION_SIZES[-1] == MOST_KERNEL_HEAD
    require_boundaries(graph, plan, arrays, batch_for(graph, (512, 9, 3)))


def test_the_families_that_are_said_to_be_covered_are_all():
    assert {*FAMILIES} | {*NOT_COVERED} == {family.name for family in known.FAMILIES}


def test_a_kernel_fed_by_the_graph_makes_the_codes_of_the_graph(graph):
    """But for rounding borders: INT8 kernels see them by FP32 sums alone, the others by FP16 as well."""
    plan, arrays = pack(match_graph(graph))
    widths = {name: tensor.width for name, tensor in plan.tensors.items()}
    for found in compare_boundaries(graph, plan, arrays, batch_for(graph, (30, 9, 4, 16, 1))):
        assert found.largest <= (1 if found.int8 else 4e-3), found
        if found.int8:
            reads_codes = found.reads == "int8"
            assert found.share <= (3 / (60 * widths[found.tensor]) if reads_codes else 0.04), found


def test_q_k_and_v_are_one_gemm_where_they_read_the_same_codes(packed):
    plan, arrays = packed("bert", "bert-int8-residual-fused")
    linears, first = plan.linears, plan.attentions[0]
    assert [len(each.parts) for each in linears] == [3, 0, 0, 0] * 2
    assert {first.query.tensor, first.key.tensor, first.value.tensor} == {linears[0].output}
    assert (first.query.column, first.key.column, first.value.column) == (0, 64, 128)
    assert arrays[f"{linears[0].name}.weight"].shape == (192, 32)  # with heads of 32, of which 16 are zeros
    residuals = [each.residual for each in linears if each.residual]
    assert [plan.tensors[name].kind for name in residuals] == ["int8"] * 4


def test_codes_beside_fp16_get_a_kernel_of_their_own_only_where_no_norm_writes_them(packed):
    plan, _ = packed("electra", "electra-int8-attention")
    (quantize,) = (each for each in plan.operations if isinstance(each, Quantize))
    assert quantize.input == "/electra/embeddings_project/Add_output_0"
    assert [each.op for each in plan.operations[:4]] == ["embed", "linear", "quantize", "linear"]


@pytest.mark.parametrize("model_type", NOT_COVERED)
def test_a_family_that_is_not_covered_is_refused_by_its_nodes(model_type, graph_of):
    with pytest.raises(UserError, match=r"no kernel for /[\w./]+ \(\w+\): .*; take tensorrt_rtx"):
        match_graph(graph_of(model_type, f"{model_type}-int8-linears"))


def test_arrays_of_other_shapes_or_types_are_refused_by_their_names(packed):
    plan, arrays = packed("bert", "bert-int8-residual-fused")
    check.check_arrays(plan, arrays)
    for name, array in arrays.items():
        table = name.startswith("embed.") and array.ndim == 2  # a smaller one is another model's
        shorter = [] if table else [array[:-1]]
        for other in (array.astype(np.float64), array[None], array[:0], array[..., :-1], *shorter):
            with pytest.raises(UserError, match="and its kernel reads"):
                check.check_arrays(plan, arrays | {name: other})
        with pytest.raises(UserError, match="is None, and its kernel reads"):
            check.check_arrays(plan, {key: value for key, value in arrays.items() if key != name})
        if array.dtype.kind == "f":
            damaged = array.copy()
            damaged.flat[-1] = np.nan if array.ndim == 1 else np.inf
            with pytest.raises(UserError, match="has numbers that are not finite"):
                check.check_arrays(plan, arrays | {name: damaged})
    with pytest.raises(UserError, match="no kernel reads more"):
        check.check_arrays(plan, arrays | {"more": array})


def test_a_plan_counts_on_nothing_that_is_not_checked(packed):
    plan, arrays = packed("bert", "bert-int8-residual-fused fixed")
    (first, second, *_), attention, head, embed = plan.linears, plan.attentions[0], plan.head, plan.embed
    quantize = Quantize(name="q", input=head.input, half="half", codes=("codes",))
    tensors = {"half": Tensor(kind="fp16", width=32), "codes": Tensor(kind="int8", width=32)}

    def refused(message, old, *new, **changed):
        operations = tuple(part for each in plan.operations for part in (new if each is old else (each,)))
        made = replace(plan, operations=operations, tensors=plan.tensors | tensors)
        with pytest.raises(UserError, match=message):
            check.check_arrays(made, arrays | changed)

    refused(f"two of {first.name}", second, replace(second, name=first.name))
    refused(f"two of {attention.name}", attention, attention, attention)
    refused("two of again", second, second, replace(second, name="again"))
    refused("the tensors of q do not fit", head, quantize, head)
    one = Answer(name="a")
    for answers in ((), (replace(one, column=7),), (replace(one, column=-1),), (one, one)):
        refused("none of the head's", head, replace(head, answers=answers))
    for epsilon in (-5.0, 0.0, 1e300):
        refused("a number of embed is none", embed, replace(embed, epsilon=epsilon))
    for change in ({"score_scale": 1e300}, {"probability_multiplier": 0.0}, {"row_max": True}):
        refused("is none that a kernel takes", attention, replace(attention, **change))
    activated = next(each for each in plan.linears if each.activation)
    for linear, center in ((first, 0.1), (activated, 1e300), (activated, np.nan)):
        refused(f"a number of {linear.name} is none", linear, replace(linear, center=center))
    named = replace(first, name=f"{head.name}.0")
    of_first = {key: arrays[f"{first.name}.{key}"] for key in ("weight", "bias", "scale")}
    refused("is an array of two", first, named, **{f"{named.name}.{key}": v for key, v in of_first.items()})


def test_arrays_of_a_head_are_told_by_whole_names(packed):
    """A linear whose name begins as that of the head keeps its numbers in FP32."""
    plan, arrays = packed("bert", "bert-int8-linears")
    linear = plan.linears[0]
    named = replace(linear, name=f"{plan.head.name}.linear")
    operations = tuple(named if each is linear else each for each in plan.operations)
    for key in ("weight", "bias", "scale"):
        arrays[f"{named.name}.{key}"] = arrays.pop(f"{linear.name}.{key}")
    check.check_arrays(replace(plan, operations=operations), arrays)
    engine = object.__new__(CudaEngine)
    engine.plan, engine.arrays = replace(plan, operations=operations), arrays
    types = {name: array.dtype for name, array in engine._prepared()}
    assert types[f"{named.name}.scale"] == np.float32
    assert types[f"{plan.head.name}.0.bias"] == np.float16


def test_a_plan_of_many_operations_is_checked_in_linear_time(packed):
    plan, arrays = packed("bert", "bert-int8-linears")
    seconds = []
    for count in (2000, 16_000):
        codes = [f"codes.{number}" for number in range(count)]
        more = (Quantize(name=f"q.{name}", input=plan.head.input, codes=(name,)) for name in codes)
        wide = replace(
            plan,
            operations=(*plan.operations[:-1], *more, plan.head),
            tensors=plan.tensors | dict.fromkeys(codes, Tensor(kind="int8", width=32)),
        )
        given = arrays | {f"{name}.multiplier": np.ones(32, np.float32) for name in codes}
        start = time.process_time()
        check.check_arrays(wide, given)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 24 * seconds[0]  # 64 times where each looks at all others


def test_plans_whose_tensors_do_not_fit_are_refused(packed):
    plan, arrays = packed("bert", "bert-int8-residual-fused")
    refused = 0
    for number, operation in enumerate(plan.operations[:-1]):
        without = (*plan.operations[:number], *plan.operations[number + 1 :])
        with pytest.raises(UserError, match=r"the plan reads .* before"):
            check.check_arrays(replace(plan, operations=without), arrays)
        for name in {*operation.reads, *operation.writes}:
            tensor = plan.tensors[name]
            other = {"int8": "fp16", "fp16": "int8"}[tensor.kind]
            for change in ({"width": tensor.width // 2}, {"kind": other}):
                tensors = plan.tensors | {name: replace(tensor, **change)}
                with pytest.raises(UserError, match="build"):
                    check.check_arrays(replace(plan, tensors=tensors), arrays)
                refused += 1
    assert refused > 40


@pytest.mark.parametrize(
    ("name", "value"), [("embed.word", 1e5), ("bert.encoder.layer.0.output.dense.bias", 1e39)]
)
def test_numbers_that_do_not_fit_are_refused_by_their_names(name, value, graph_of):
    found = match_graph(graph_of("bert", "bert-int8-residual-fused"))
    found.constants[name] = np.full_like(found.constants[name], value, np.float64)
    with pytest.raises(UserError, match=f"{name} does not fit float"):
        pack(found)
