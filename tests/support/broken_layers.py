"""The tiny BERT layer broken in one place at a time, with what `check` must say about it."""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from .tiny_layer import (
    CONTEXT,
    HIDDEN,
    INPUT,
    LENGTH,
    NORM,
    QUERY,
    SOFTMAX,
    WEIGHT,
    Edit,
    at_opset,
    changed,
    give,
    healthy,
    insert,
    make,
    node,
    old_opset,
    pair,
    quantized,
    rewired,
    set_axis,
    store,
    stored,
    unquantized,
)


def vector_activation(model):
    store(model, "/layer/query/input.scale", np.full(HIDDEN, 0.02))
    store(model, "/layer/query/input.zero_point", np.zeros(HIDDEN))
    set_axis(model, "/layer/query/input/Q", 2)
    set_axis(model, "/layer/query/input/DQ", 2)


def transposed_weight(model):
    """Scales along axis 1 of a weight whose output channels are axis 0 before the Transpose."""
    insert(model, QUERY, 1, make("Transpose", "/t", perm=[1, 0]))


def rightly_transposed_weight(model):
    transposed_weight(model)
    set_axis(model, WEIGHT, 0)


def vector_before_matmul(model):
    """A Mul by a vector between DQ and MatMul keeps the engine from INT8; after the MatMul it does not."""
    insert(model, QUERY, 1, make("Mul", "/vector", give(model, "vector", np.ones(HIDDEN), np.float16)))


def relu_before_output(model):
    """No Q directly behind the second matmul of the attention."""
    insert(model, "/layer/output/input/Cast", 0, make("Relu", "/relu"))


def other_scale(model):
    node(model, "/layer/query/input/DQ").input[1] = give(model, "other", 0.03, np.float32)


def int32_weight(model):
    store(model, "/layer/query.weight", np.ones((HIDDEN, HIDDEN)), np.int32)
    del node(model, WEIGHT).input[2]


def uint8_weight(model):
    store(model, "/layer/query.weight", np.ones((HIDDEN, HIDDEN)), np.uint8)
    store(model, "/layer/query.weight_zero_point", 0, np.uint8)


def fp8_pair(model):
    """Q/DQ of FP8, which is neither INT8 nor refused."""
    pairs = (*pair(model, "/x", np.float32), make("Relu", "/relu"))
    zero = next(t for t in model.graph.initializer if t.name == "/x.z")
    zero.CopyFrom(helper.make_tensor(zero.name, TensorProto.FLOAT8E4M3FN, [], [0]))
    insert(model, "/layer/norm0", 0, *pairs)


def fp8_and_int8(model):
    """An FP8 activation times an INT8 weight."""
    zero = next(t for t in model.graph.initializer if t.name == "/layer/query/input.zero_point")
    zero.CopyFrom(helper.make_tensor(zero.name, TensorProto.FLOAT8E4M3FN, [], [0]))


def own_attention(width, *mask, **attributes):
    """ONNX's Attention ahead of the last LayerNorm, with heads of a width."""

    def edit(model):
        old_opset(model, 23)
        heads = {"q_num_heads": HIDDEN // width, "kv_num_heads": HIDDEN // width}
        others = ["/layer/norm0.out", "/layer/norm0.out", *mask]
        insert(model, NORM, 0, make("Attention", "/own", *others, **heads, **attributes))
        q = helper.make_tensor_value_info("/layer/Add.out", 0, [1, LENGTH, HIDDEN])
        model.graph.value_info.append(q)

    return edit


def attention_after_qdq(model):
    own_attention(HIDDEN // 2)(model)
    insert(model, "/own", 0, *pair(model, "/x"))


def repeated(model):
    """Each number once, which no engine takes as its size depends on the values."""
    insert(model, "/layer/norm0", 0, make("Identity", "/same"))
    unique = helper.make_node("Unique", ["/same.out"], ["/unique.out"], name="/unique")
    model.graph.node.insert(1, unique)
    model.graph.output.append(helper.make_tensor_value_info("/unique.out", TensorProto.FLOAT16, ["n"]))


def random_order(model):
    """An operator that no engine was built with."""
    give(model, "like", np.zeros((1, LENGTH, HIDDEN)), np.float32)
    noise = helper.make_node("RandomUniformLike", ["like"], ["noise"], name="/noise")
    model.graph.node.insert(0, noise)
    insert(model, NORM, 0, make("Add", "/noisy", "noise"))


def declared_as_fp32(model):
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT


def quantized_gemm(model, axis=1):
    """Per-channel INT8 for the classifier, whose weight [3, 32] is transposed by transB."""
    model.graph.initializer.remove(next(t for t in model.graph.initializer if t.name == "classifier.weight"))
    size = (3, HIDDEN)[axis]
    names = [
        give(model, "classifier.weight", np.ones((3, HIDDEN)), np.int8),
        give(model, "classifier.s", np.full(size, 0.01), np.float32),
        give(model, "classifier.z", np.zeros(size), np.int8),
    ]
    insert(model, "/classifier/Gemm", 0, *pair(model, "/classifier", np.float32))
    dq = make("DequantizeLinear", "/classifier/weight/DQ", *names[1:], axis=axis)
    insert(model, "/classifier/Gemm", 1, dq)


def residual_like_its_readers(model):
    insert(model, "/layer/Add", 1, *pair(model, "/x", np.float32))


def fp16_scales(model):
    """FP16 scales on the query, and no casts around its Q/DQ."""
    store(model, "/layer/query/input.scale", 0.02, np.float16)
    store(model, "/layer/query.weight_scale", np.full(HIDDEN, 0.01), np.float16)
    node(model, "/layer/query/input/Q").input[0] = "/layer/norm0.out"
    node(model, "/layer/query/MatMul").input[:] = ["/layer/query/input/DQ.out", "/layer/query/weight/DQ.out"]


def float_weight(model):
    store(model, "/layer/query.weight", np.ones((HIDDEN, HIDDEN)), np.float32)
    dq = node(model, "/layer/query/weight/DQ")
    q = make("QuantizeLinear", "/layer/query/weight/Q", *dq.input[1:], axis=1)
    insert(model, dq.name, 0, q)


def mask_in_fp32(model):
    """An FP32 fill that becomes -inf in a Cast behind the Mul."""
    store(model, "fill", -3.4e38, np.float32)
    insert(model, "/mask/Mul", 0, make("Cast", "/mask/Cast", to=TensorProto.FLOAT))
    insert(model, "/layer/self/Add", 1, make("Cast", "/mask/Cast_1", to=TensorProto.FLOAT16))


def written_out_norm(model):
    insert(model, "/layer/norm0", 0, *pair(model, "/x"))
    norm = node(model, "/layer/norm0")
    mean = helper.make_node("ReduceMean", [norm.input[0]], ["mean"], name="/norm0/ReduceMean")
    insert(model, norm.name, 0, make("Sub", "/norm0/Sub", "mean"))
    at = next(i for i, n in enumerate(model.graph.node) if n.name == "/norm0/Sub")
    model.graph.node.insert(at, mean)


def softmax_without_attention(model):
    insert(model, "/layer/norm1", 0, make("Softmax", "/gate"), *pair(model, "/gate"))
    insert(model, "/layer/norm1", 0, make("Relu", "/relu"))


def wide_heads(model):
    for name in ("query", "key", "value"):
        store(model, f"/layer/{name}.shape", [1, LENGTH, 4, HIDDEN // 4])


def half_scale(model):
    store(model, "/layer/query/input.scale", 0.02, np.float16)
    node(model, INPUT).input[0] = "/layer/norm0.out"
    node(model, QUERY).input[0] = "/layer/query/input/DQ.out"
    old_opset(model, 18)


def fused_by_onnxruntime(name, operator):
    def edit(model):
        node(model, name).op_type, node(model, name).domain = operator, "com.microsoft"
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))

    return edit


def plugin(model):
    node(model, "/layer/norm1").domain = "trt.plugins"
    model.opset_import.append(helper.make_opsetid("trt.plugins", 1))


def product_of_codes(model):
    """QLinearMatMul for the query, whose result has the scale of its input."""
    q, product = node(model, INPUT), node(model, QUERY)
    product.op_type = "QLinearMatMul"
    product.input[:] = [q.output[0], *q.input[1:], *node(model, WEIGHT).input, *q.input[1:]]
    insert(model, "/layer/query/Add", 0, make("DequantizeLinear", "/layer/query/out/DQ", *q.input[1:]))


def dynamic(model):
    """DynamicQuantizeLinear instead of the query's Q."""
    q, dq = node(model, "/layer/query/input/Q"), node(model, "/layer/query/input/DQ")
    q.op_type = "DynamicQuantizeLinear"
    del q.input[1:]
    q.output.extend(["dynamic.scale", "dynamic.zero_point"])
    dq.input[1:] = ["dynamic.scale", "dynamic.zero_point"]


def computed_scale(model):
    top = helper.make_node("ReduceMax", ["/layer/query/input/Cast.out"], ["top"], name="/top", keepdims=0)
    at = next(i for i, n in enumerate(model.graph.node) if n.name == "/layer/query/input/Q")
    model.graph.node.insert(at, top)
    node(model, "/layer/query/input/Q").input[1] = "top"
    node(model, "/layer/query/input/DQ").input[1] = "top"


def blocked(model):
    old_opset(model, 21)
    store(model, "/layer/query.weight_scale", np.full((2, HIDDEN), 0.01))
    store(model, "/layer/query.weight_zero_point", np.zeros((2, HIDDEN)))
    dq = node(model, "/layer/query/weight/DQ")
    dq.attribute.extend([helper.make_attribute("axis", 0), helper.make_attribute("block_size", HIDDEN // 2)])


def cast_instead_of_q(model):
    q = node(model, "/layer/query/input/Q")
    q.op_type = "Cast"
    del q.input[1:]
    q.attribute.append(helper.make_attribute("to", TensorProto.INT8))


def cast_instead_of_dq(model):
    q, _ = pair(model, "/x")
    insert(model, "/layer/norm1", 0, q, make("Cast", "/x/Cast", to=TensorProto.FLOAT16))


def subgraph(model):
    value = helper.make_tensor_value_info("branch.out", TensorProto.FLOAT16, None)
    inner = helper.make_node("Identity", ["/layer/norm1.out"], ["branch.out"])
    branch = helper.make_graph([inner], "branch", [], [value])
    give(model, "yes", True, np.bool_)
    insert(model, "/first", 0, make("If", "/if", then_branch=branch, else_branch=branch))
    node(model, "/if").input[0] = "yes"


@dataclass(frozen=True)
class Case:
    """A broken model and what `check` must say about it."""

    code: str
    node: str  # where
    edit: Edit
    form: str = "factored"
    is_refused: bool = False  # by the parser of TensorRT-RTX 1.7
    # linears in INT8 in an engine of TensorRT-RTX 1.7.1, built ahead of time; None: none was built
    int8: int | None = 4

    def broken(self):
        model = healthy(self.form)
        self.edit(model)
        return model


def refused(code, node, edit, form="factored"):
    return Case(code, node, edit, form, is_refused=True, int8=None)


ONE_BAD = {bad: np.r_[np.full(HIDDEN - 1, 0.01), bad] for bad in (0, np.nan)}
CASES = [
    Case("half-quantized", QUERY, unquantized("/layer/query/input"), int8=3),
    Case("half-quantized", QUERY, vector_before_matmul, int8=3),
    refused("non-zero-zero-point", INPUT, stored("/layer/query/input.zero_point", 3)),
    refused(
        "non-zero-zero-point",
        WEIGHT,
        stored("/layer/query.weight_zero_point", np.eye(1, HIDDEN, 5)[0]),
        "fp16",
    ),
    refused("bad-scale", INPUT, stored("/layer/query/input.scale", 0)),
    refused("bad-scale", INPUT, stored("/layer/query/input.scale", -0.02)),
    refused("bad-scale", INPUT, stored("/layer/query/input.scale", np.nan)),
    Case("bad-scale", INPUT, stored("/layer/query/input.scale", np.inf)),
    refused("bad-scale", WEIGHT, stored("/layer/query.weight_scale", ONE_BAD[0]), "fp32"),
    refused("bad-scale", WEIGHT, stored("/layer/query.weight_scale", ONE_BAD[np.nan]), "fp32"),
    Case("per-channel-activation", INPUT, vector_activation, int8=3),
    Case("wrong-weight-axis", WEIGHT, lambda model: set_axis(model, WEIGHT, 0), "fp16", int8=3),
    Case("wrong-weight-axis", WEIGHT, transposed_weight, "fp32", int8=3),
    Case("wrong-weight-axis", "/classifier/weight/DQ", quantized_gemm, "fp32"),
    Case("uint8", INPUT, stored("/layer/query/input.zero_point", 0, np.uint8)),
    refused("uint8", INPUT, stored("/layer/query/input.zero_point", 128, np.uint8)),
    refused("uint8", WEIGHT, uint8_weight),
    Case("other-codes", "/x/Q", fp8_pair, "fp32"),
    refused("operator-refused", "/unique", repeated),
    Case("attention-operator", "/own", own_attention(HIDDEN // 2, "mask"), "fp32", int8=None),
    Case("operator-refused", "/own", own_attention(8, "mask"), int8=None),
    refused("operator-refused", "/own", own_attention(HIDDEN // 2, softcap=2.0)),
    Case("attention-operator", "/own", attention_after_qdq),
    Case("not-checked", "/noise", random_order, "fp32"),
    Case("quantized-layernorm", NORM, quantized(NORM)),
    Case("quantized-layernorm", NORM, quantized(NORM, 1)),
    Case("quantized-layernorm", "/norm0/ReduceMean", written_out_norm),
    Case("quantized-softmax", SOFTMAX, quantized(SOFTMAX)),
    Case("quantized-softmax", SOFTMAX, quantized("/layer/self/Mul")),
    Case("quantized-softmax", "/gate", softmax_without_attention),
    Case("split-residual", "/layer/Add", quantized("/layer/Add", 1)),  # an FP16 scale of the same value
    Case("quantized-residual", "/layer/Add", residual_like_its_readers, "fp32"),
    refused("mixed-types", "/layer/query/Add", stored("/layer/query.bias", np.zeros(HIDDEN), np.float32)),
    refused("mixed-types", NORM, stored(f"{NORM}.scale", np.ones(HIDDEN), np.float32)),
    refused("mixed-types", QUERY, rewired(QUERY, 1, f"{WEIGHT}.out")),
    Case("mixed-types", INPUT, rewired(INPUT, 0, "/layer/norm0.out")),
    Case("mixed-types", "/classifier/Gemm", declared_as_fp32),
    Case("constant-overflows-fp16", "/mask/Mul", stored("fill", -np.inf)),
    Case("constant-overflows-fp16", "/mask/Mul", mask_in_fp32),
    Case("constant-overflows-fp16", "/mask/Mul", stored("fill", -3.4e38), "fp32"),
    Case("nan-constant", NORM, stored(f"{NORM}.bias", np.full(HIDDEN, np.nan))),
    Case("fp16-overflow", QUERY, fp16_scales, "fp16"),
    Case("partial-attention", "/layer/self/MatMul", unquantized("/layer/self/q")),
    Case("partial-attention", "/layer/self/MatMul", unquantized("/layer/self/k")),
    Case("partial-attention", CONTEXT, unquantized("/layer/self/p")),
    Case("partial-attention", CONTEXT, unquantized("/layer/self/v")),
    Case("partial-attention", CONTEXT, relu_before_output),
    Case("attention-head-size", "/layer/self/MatMul", wide_heads),
    Case("float-weight", "/layer/query/weight/Q", float_weight, "fp32"),
    refused("unsupported-op", QUERY, product_of_codes, "fp32"),
    refused("no-plain-form", INPUT, dynamic),
    refused("no-plain-form", QUERY, fused_by_onnxruntime(QUERY, "QAttention")),
    refused("onnxruntime-operators", NORM, fused_by_onnxruntime(NORM, "SkipLayerNormalization")),
    Case("dynamic-scale", INPUT, computed_scale, int8=3),
    Case("scale-mismatch", "/layer/query/input/DQ", other_scale),
    refused("zero-point-shape", WEIGHT, stored("/layer/query.weight_zero_point", 0), "fp16"),
    refused("not-int8", WEIGHT, int32_weight),
    Case("blocked-scale", WEIGHT, blocked, int8=None),
    Case("q-without-dq", "/x/Q", cast_instead_of_dq),
    Case("dq-without-q", "/layer/query/input/DQ", cast_instead_of_q),
    Case("opset-too-low", INPUT, half_scale),
    Case("opset-too-low", WEIGHT, at_opset(12), "fp32"),
    Case("opset-too-low", "tiny", at_opset(9)),
    Case("not-checked", "/if", subgraph),
    Case("not-checked", NORM, plugin),
    Case("invalid-onnx", "/layer/Add", lambda model: node(model, "/layer/Add").input.pop()),
    refused("invalid-onnx", "/layer/query/Add", changed("/layer/query/Add", "op_type", "Plus")),
]
IDS = [f"{number}-{case.code}" for number, case in enumerate(CASES)]
