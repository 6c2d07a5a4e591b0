"""A tiny BERT layer in ONNX as the exporter writes it, and small edits to break it with."""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .graphs import model_of

HIDDEN, HEADS, LENGTH = 32, 2, 4
FORMS = ("fp32", "fp16", "factored")
LINEARS = [f"/layer/{name}/MatMul" for name in ("query", "key", "value", "output")]
SOFTMAX, CONTEXT, NORM = "/layer/self/Softmax", "/layer/self/MatMul_1", "/layer/norm1"
QUERY, WEIGHT, INPUT = "/layer/query/MatMul", "/layer/query/weight/DQ", "/layer/query/input/Q"

Edit = Callable[[onnx.ModelProto], object]


class Net:
    """A graph under construction, in the shape that the exporter of qdqbench writes."""

    def __init__(self, form):
        self.form = form
        self.dtype = np.float32 if form == "fp32" else np.float16
        self.type = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        self.nodes = []
        self.constants = []
        self.rng = np.random.default_rng(0)

    def add(self, operator, *inputs, name, **attributes):
        self.nodes.append(helper.make_node(operator, inputs, [f"{name}.out"], name=name, **attributes))
        return f"{name}.out"

    def constant(self, name, value, dtype=None):
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype or self.dtype), name))
        return name

    def cast(self, x, to, name):
        return x if self.form == "fp32" else self.add("Cast", x, name=name, to=to)

    def quantize(self, x, name, scale=0.02):
        scale_name = self.constant(f"{name}.scale", scale, np.float32)
        zero_point = self.constant(f"{name}.zero_point", 0, np.int8)
        x = self.cast(x, TensorProto.FLOAT, f"{name}/Cast")
        x = self.add("QuantizeLinear", x, scale_name, zero_point, name=f"{name}/Q")
        x = self.add("DequantizeLinear", x, scale_name, zero_point, name=f"{name}/DQ")
        return self.cast(x, self.type, f"{name}/Cast_1")

    def linear(self, x, name):
        x = self.quantize(x, f"{name}/input")
        codes = self.rng.integers(-127, 128, (HIDDEN, HIDDEN))
        factors = self.rng.uniform(0.5, 1, HIDDEN)
        weight = self.constant(f"{name}.weight", codes, np.int8)
        scale = 0.01 if self.form == "factored" else 0.01 * factors
        zeros = np.zeros_like(scale, np.int8)
        scale_name = self.constant(f"{name}.weight_scale", scale, np.float32)
        zero_point = self.constant(f"{name}.weight_zero_point", zeros, np.int8)
        axis = {} if self.form == "factored" else {"axis": 1}
        w = self.add("DequantizeLinear", weight, scale_name, zero_point, name=f"{name}/weight/DQ", **axis)
        w = self.cast(w, self.type, f"{name}/weight/Cast")
        x = self.add("MatMul", x, w, name=f"{name}/MatMul")
        if self.form == "factored":
            x = self.add("Mul", x, self.constant(f"{name}.factors", factors), name=f"{name}/Mul")
        bias = self.constant(f"{name}.bias", np.zeros(HIDDEN))
        return self.add("Add", x, bias, name=f"{name}/Add")

    def norm(self, x, name):
        scale = self.constant(f"{name}.scale", np.ones(HIDDEN))
        bias = self.constant(f"{name}.bias", np.zeros(HIDDEN))
        return self.add("LayerNormalization", x, scale, bias, name=name, axis=-1)

    def heads(self, x, name):
        shape = self.constant(f"{name}.shape", [1, LENGTH, HEADS, HIDDEN // HEADS], np.int64)
        x = self.add("Reshape", x, shape, name=f"{name}/Reshape")
        return self.add("Transpose", x, name=f"{name}/Transpose", perm=[0, 2, 1, 3])


def healthy(form="factored", *, int8_attention=True):
    """LayerNorm, attention with four INT8 linears, residual, LayerNorm and a float classifier."""
    net = Net(form)

    def quantize(x, name, scale=0.02):
        return net.quantize(x, name, scale) if int8_attention else x

    start = net.norm("x", "/layer/norm0")
    q, k, v = (net.heads(net.linear(start, f"/layer/{n}"), f"/layer/{n}") for n in ("query", "key", "value"))
    q, v = quantize(q, "/layer/self/q"), quantize(v, "/layer/self/v")
    k = net.add("Transpose", quantize(k, "/layer/self/k"), name="/layer/self/kT", perm=[0, 1, 3, 2])
    scores = net.add("MatMul", q, k, name="/layer/self/MatMul")
    scores = net.add("Mul", scores, net.constant("scaling", 0.25), name="/layer/self/Mul")
    fill = net.add("Mul", "mask", net.constant("fill", -1e4), name="/mask/Mul")
    softmax = net.add("Add", scores, fill, name="/layer/self/Add")
    softmax = net.add("Softmax", softmax, name="/layer/self/Softmax", axis=-1)
    softmax = quantize(softmax, "/layer/self/p", 1 / 127)
    context = net.add("MatMul", softmax, v, name="/layer/self/MatMul_1")
    context = net.add("Transpose", context, name="/layer/self/Transpose", perm=[0, 2, 1, 3])
    shape = net.constant("merged", [1, LENGTH, HIDDEN], np.int64)
    context = net.add("Reshape", context, shape, name="/layer/self/Reshape")
    residual = net.add("Add", net.linear(context, "/layer/output"), start, name="/layer/Add")
    last = net.norm(residual, "/layer/norm1")
    first = net.add("Gather", last, net.constant("zero", 0, np.int64), name="/first", axis=1)
    weight = net.constant("classifier.weight", net.rng.normal(size=(3, HIDDEN)))
    net.add(
        "Gemm", first, weight, net.constant("classifier.bias", np.zeros(3)), name="/classifier/Gemm", transB=1
    )
    inputs = {"x": (1, LENGTH, HIDDEN), "mask": (1, 1, 1, LENGTH)}
    kinds = dict.fromkeys((*inputs, "/classifier/Gemm.out"), net.type)
    model = model_of(net.nodes, inputs, {"/classifier/Gemm.out": (1, 3)}, **kinds)
    model.graph.initializer.extend(net.constants)
    return model


# Small edits of a model, from which the broken ones are made.


def node(model, name):
    return next(n for n in model.graph.node if n.name == name)


def store(model, name, value, dtype=None):
    """Replace an initializer, in its own type by default."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    own = numpy_helper.to_array(tensor).dtype
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(value, dtype or own), name))


def give(model, name, value, dtype):
    """Add an initializer."""
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
    return name


def insert(model, reader, position, *chain):
    """Put a chain of nodes before one input of a node; the first input of each is the one before."""
    target = node(model, reader)
    current = target.input[position]
    for item in chain:
        item.input[0] = current
        current = item.output[0]
    target.input[position] = current
    at = next(i for i, n in enumerate(model.graph.node) if n.name == reader)
    rest = list(model.graph.node)[at:]
    del model.graph.node[at:]
    model.graph.node.extend([*chain, *rest])


def make(operator, name, *others, **attributes):
    return helper.make_node(operator, ["", *others], [f"{name}.out"], name=name, **attributes)


def pair(model, name, dtype=np.float16):
    """A Q and a DQ whose scale has the type of the tensor they quantize."""
    others = (give(model, f"{name}.s", 0.02, dtype), give(model, f"{name}.z", 0, np.int8))
    return make("QuantizeLinear", f"{name}/Q", *others), make("DequantizeLinear", f"{name}/DQ", *others)


def skip_qdq(model, name):
    """Let the readers of a Q/DQ pair (with its casts, if any) read the tensor before it."""
    first = next(n for n in model.graph.node if n.name.startswith(f"{name}/"))
    ends = {f"{name}/Cast_1.out", f"{name}/DQ.out"}
    for item in model.graph.node:
        for position, source in enumerate(item.input):
            if source in ends and not item.name.startswith(f"{name}/"):
                item.input[position] = first.input[0]


def set_axis(model, name, axis):
    target = node(model, name)
    del target.attribute[:]
    target.attribute.append(helper.make_attribute("axis", axis))


def old_opset(model, version):
    model.opset_import[0].version = version


# The same edits as functions of a model, to be applied later.


def stored(name, value, dtype=None):
    return lambda model: store(model, name, value, dtype)


def quantized(reader, position=0):
    """A Q/DQ pair on one input of a node."""
    return lambda model: insert(model, reader, position, *pair(model, "/x"))


def unquantized(name):
    return lambda model: skip_qdq(model, name)


def rewired(reader, position, source):
    return lambda model: node(model, reader).input.__setitem__(position, source)


def changed(name, field, value):
    return lambda model: setattr(node(model, name), field, value)


def at_opset(version):
    return lambda model: old_opset(model, version)
