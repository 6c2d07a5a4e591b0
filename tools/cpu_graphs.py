"""Write small graphs in which a CPU runtime runs more kernels than it needs, and show their kernels.

    python -m tools.cpu_graphs OUT --batch 8 --length 128 --threads 2

Each graph has a twin that computes the same, or nearly so, in fewer or faster kernels. OUT gets both as ONNX.
The table names each kernel with its datatypes and ms, the least as in `cpu_kernels`.
docs/explanation/cpu-runtime-issues.md tells of it.
"""

import argparse
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tools.cpu_kernels import Timed

from qdqbench.quantize.engine.cpu_runtimes import choose_compute, compile_model
from qdqbench.quantize.standalone.runtimes import load_openvino
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.limits import BackendName
from qdqbench.quantize.utils.system.cpu import find_cpu

OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
WIDTH, HEADS, FEED_FORWARD = 768, 12, 3072  # of BERT-base
BLOCKS = 15


class Graph:
    """Nodes and constants of a graph with an input `x` [batch, length, width]."""

    def __init__(self, width: int = WIDTH) -> None:
        self.nodes, self.constants, self.width = list[onnx.NodeProto](), dict[str, Array](), width
        self._random = np.random.default_rng(0)

    def add(self, kind: str, *inputs: str, **attributes: object) -> str:
        output = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, [*inputs], [output], name=output, **attributes))
        return output

    def hold(self, value: Array) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name

    def draw(self, *shape: int) -> str:
        return self.hold(self._random.normal(size=shape).astype(np.float32))

    def linear(self, x: str, width: int, out: int) -> str:
        """Add a linear layer in INT8: Q and DQ of its input, weights with a DQ, and a bias."""
        scale, zero = self.hold(np.float32(0.03)), self.hold(np.int8(0))
        codes = self.add("DequantizeLinear", self.add("QuantizeLinear", x, scale, zero), scale, zero)
        kept = self.hold(self._random.integers(-127, 128, (width, out)).astype(np.int8))
        weight = self.add("DequantizeLinear", kept, self.hold(np.float32(1e-4)), zero)
        return self.add("Add", self.add("MatMul", codes, weight), self.draw(out))

    def norm(self, x: str) -> str:
        return self.add("LayerNormalization", x, self.draw(self.width), self.draw(self.width))

    def finish(self, y: str) -> onnx.ModelProto:
        shape = ["batch", "length", self.width]
        made = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, None)],
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        return helper.make_model(made, opset_imports=OPSETS, ir_version=10)


def attention(shift: bool = False, fused: bool = False) -> onnx.ModelProto:
    """Make an attention in floating point, then a linear layer in INT8.

    `shift`: an Add is in front of its Q; `fused`: the attention is one operator of ONNX Runtime.
    """
    graph = Graph()
    if fused:
        parts = [graph.linear("x", WIDTH, WIDTH) for _ in range(3)]
        about = {"domain": OPSETS[1].domain, "num_heads": HEADS, "scale": 1.0}
        return graph.finish(graph.linear(graph.add("MultiHeadAttention", *parts, **about), WIDTH, WIDTH))
    split = graph.hold(np.array([0, 0, HEADS, WIDTH // HEADS], np.int64))
    turned = []
    for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)):
        part = graph.linear("x", WIDTH, WIDTH)
        turned.append(graph.add("Transpose", graph.add("Reshape", part, split), perm=perm))
    scores = graph.add("Softmax", graph.add("MatMul", *turned[:2]), axis=-1)
    joined = graph.add("Transpose", graph.add("MatMul", scores, turned[2]), perm=(0, 2, 1, 3))
    joined = graph.add("Reshape", joined, graph.hold(np.array([0, 0, WIDTH], np.int64)))
    joined = graph.add("Add", joined, graph.draw(WIDTH)) if shift else joined
    return graph.finish(graph.linear(joined, WIDTH, WIDTH))


def norm(twice: bool) -> onnx.ModelProto:
    """Make a LayerNorm that a linear layer in INT8 and a residual read; its gamma and beta once or twice."""
    graph = Graph()
    factors = np.linspace(0.5, 2, WIDTH).astype(np.float32)
    if twice:
        ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
        plain = graph.add("LayerNormalization", "x", graph.hold(ones), graph.hold(zeros))
        gamma = np.asarray(graph.constants[graph.draw(WIDTH)])
        read = [
            graph.add("Add", graph.add("Mul", plain, graph.hold(gamma * each)), graph.draw(WIDTH))
            for each in (factors, ones)
        ]
    else:
        made = graph.norm("x")
        read = [graph.add("Mul", made, graph.hold(factors)), made]
    return graph.finish(graph.norm(graph.add("Add", read[1], graph.linear(read[0], WIDTH, WIDTH))))


def gelu(kind: str) -> onnx.ModelProto:
    """Make two linear layers in INT8 with an activation between."""
    graph = Graph()
    hidden = graph.linear("x", WIDTH, FEED_FORWARD)
    if kind:
        hidden = graph.add("Gelu", hidden, approximate=kind)
    return graph.finish(graph.linear(hidden, FEED_FORWARD, WIDTH))


GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    "attention": attention,
    "attention-add": lambda: attention(shift=True),
    "attention-fused": lambda: attention(fused=True),
    "norm": lambda: norm(twice=False),
    "norm-twice": lambda: norm(twice=True),
    "gelu-tanh": lambda: gelu("tanh"),
    "gelu-exact": lambda: gelu("none"),
    "gelu-without": lambda: gelu(""),
}


def show(runtime: BackendName, path: Path, shape: tuple[int, int], threads: int) -> None:
    # OpenVINO's as it is: compile_model rewrites a file
    data = load_openvino().Core().read_model(path) if runtime == "openvino" else path.read_bytes()
    compute = choose_compute(runtime, find_cpu(), "fp16")
    model = compile_model(runtime, data, blob=False, compute=compute, threads=threads, profile=True)
    feeds = {"x": np.random.default_rng(0).normal(size=(*shape, WIDTH)).astype(np.float32)}
    timed = Timed(model, [feeds], means=runtime == "openvino")
    for _ in range(BLOCKS):
        timed.block()
    for (row, _), ms in zip(model.kernels(), timed.least, strict=True):
        if row.inputs and row.kind != "Reshape":
            types = f"{'/'.join(dict.fromkeys(row.inputs))} > {'/'.join(row.outputs)}"
            print(f"  {ms:8.3f} ms  {row.kind:20} {types:20} {row.kernel}  {row.name}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    for name, value in (("batch", 8), ("length", 128), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"{find_cpu()}, {given.threads} threads, {given.batch} x {given.length}")
    for name, make in GRAPHS.items():
        path = given.out / f"{name}.onnx"
        onnx.save(make(), path)
        runtimes: tuple[BackendName, ...] = ("openvino", "onnxruntime")
        for runtime in runtimes[name == "attention-fused" :]:
            print(path.name, runtime, importlib.metadata.version(runtime))
            show(runtime, path, (given.batch, given.length), given.threads)


if __name__ == "__main__":
    main()
