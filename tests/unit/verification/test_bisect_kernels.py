"""Bisecting an engine of backend cuda: the interpreter stands in for its kernels, one of which is wrong."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest

from qdqbench.eval.verification.bisect import bisect_kernels, bisect_lines, compare_kernel
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.utils.errors import UserError

from ...support.cuda_graphs import batch_for, write_once
from ...support.interpreted import Interpreted

NORM = "bert.encoder.layer.0.output.LayerNorm"


@pytest.fixture(scope="module")
def graph(made_once):
    return onnx.load(write_once(made_once, "bert-int8-residual-fused", 32))


def found(graph, **spoilt):
    """The result for an engine whose arrays are other ones."""
    plan, arrays = pack(match_graph(graph))
    return bisect_kernels(Interpreted(plan, arrays | spoilt), graph, batch_for(graph), BERT)


def test_right_kernels_have_no_bad_block(graph):
    result = found(graph)
    assert [*result.blocks] == ["embed", "layer.0", "layer.1", "head"]
    assert all(row.error == 0 for row in result.blocks.values())
    assert bisect_lines(result)[-2] == "no block is wrong"
    assert "every kernel makes what the interpreter makes" in bisect_lines(result)[-1]


SPOILT = {  # array: factor, what is spoilt, its last ONNX node, the likely cause
    "embed.gamma": (2.0, "embed", "embed", "", ""),
    "bert.encoder.layer.0.attention.self.qkv.scale": (1.5, "layer.0", "linear", "/query/MatMul", "factor 1."),
    "bert.encoder.layer.0.attention.self.scale": (-1.0, "layer.0", "attention", "/MatMul_1", "factor -"),
    "bert.encoder.layer.1.output.dense.weight": (0, "layer.1", "linear", "/dense/MatMul", ""),
    f"{NORM}.beta": (np.inf, "layer.0", "norm", "/LayerNormalization", ""),
    "head.2.weight": (3.0, "head", "head", "/Tanh", ""),
}


@pytest.mark.parametrize("array", SPOILT)
def test_the_operation_whose_arrays_are_spoilt_is_named(graph, array):
    factor, block, operator, node, cause = SPOILT[array]
    _, arrays = pack(match_graph(graph))
    result = found(graph, **{array: (arrays[array] * factor).astype(arrays[array].dtype)})
    assert (result.block, result.operator) == (block, operator)
    assert [name for name, row in result.blocks.items() if not row.holds] == [block]
    assert array.startswith(str(result.node))
    assert node in result.notes[-1]
    assert cause in result.cause
    lines = "\n".join(bisect_lines(result))
    assert f"made by: {result.node} ({operator})" in lines
    assert "engines were built" not in lines
    assert json.loads(result.model_dump_json())["node"] == result.node
    assert (result.before is None) == (operator == "embed")


def test_an_engine_of_another_graph_is_refused(graph):
    plan, arrays = pack(match_graph(graph))
    other = replace(plan, inputs=plan.inputs[:-1])
    with pytest.raises(UserError, match="another plan than its graph; build it again"):
        bisect_kernels(Interpreted(other, arrays), graph, batch_for(graph), BERT)


def test_codes_may_differ_by_a_step_at_few_places(graph):
    linear = next(each for each in pack(match_graph(graph))[0].operations if each.op == "linear")
    right = np.full((40, 50), 100, np.int8)
    for count, step, holds in ((10, 1, True), (11, 1, False), (1, 2, False)):
        got = right.copy()
        got.flat[:count] += step
        row = compare_kernel(linear, "x", got, right)
        assert (row.tensor, row.holds) == ("x", holds)
    right[-1, -1] = -128
    for center, most in ((0.0, 58), (1.0, 121)):  # of 2,000: 0.5%, and what an error of tanh may move
        gelu = replace(linear, activation="gelu_tanh", center=center)
        for count in (most, most + 1):
            got = right.copy()
            got.flat[:count] += 1
            assert compare_kernel(gelu, "x", got, right).holds is (count == most)
    halves = np.full((40, 50), 100, np.float16)
    assert compare_kernel(linear, "x", halves * np.float16(1.003), halves).holds
    assert not compare_kernel(linear, "x", halves * np.float16(1.01), halves).holds
