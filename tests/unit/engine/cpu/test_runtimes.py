"""What CPU runtimes compile: the same answers, INT8 where it was asked, and engines that load again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqbench.eval.metrics.runners import session_of
from qdqbench.quantize.engine import backend as backend_module
from qdqbench.quantize.engine import build as builds
from qdqbench.quantize.engine import cpu_runtimes
from qdqbench.quantize.engine.build import build, list_gemms
from qdqbench.quantize.engine.cpu_runtimes import choose_compute, compile_model, name_products, warm_up
from qdqbench.quantize.engine.layers import is_int8
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.results import EngineResult, LayerRow
from qdqbench.quantize.engine.sidecar import read_sidecar
from qdqbench.quantize.graph.export import FORMS, ExportSettings, finish_graph, trace
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.system.cpu import Cpu

from ....support import cpus
from ....support.graphs import model_of
from ....support.tiny_bert import quantized, recipe_with, traced

BACKENDS = ("openvino", "onnxruntime")
PROFILE = Profile((1, 16), (2, 16), (4, 32))


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("openvino", reason="needs openvino: pip install 'qdqbench[openvino]'")


def test_openvino_tells_no_server(tmp_path):
    """Its import starts a process that writes an identity to ~/intel and asks Google Analytics."""
    program = "from qdqbench.quantize.engine.backend import _import; print(_import('openvino').Core())"
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {
        "HOME": str(tmp_path)
    }
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert not (tmp_path / "intel").exists()


@pytest.fixture(scope="module")
def graphs(tiny_bert, tmp_path_factory) -> dict[str, Path]:
    """The graph of INT8 linears in the form of each backend, and in that of TensorRT-RTX."""
    folder, recipe = tmp_path_factory.mktemp("graphs"), recipe_with("bert-int8-linears")
    made = {}
    for backend in FORMS:
        settings = ExportSettings.of(recipe, backend)
        made[backend] = folder / f"{backend}.onnx"
        onnx.save(finish_graph(traced(tiny_bert), quantized(tiny_bert).plan, settings), made[backend])
    return made


def linears(path: Path) -> list[str]:
    return [name for name in list_gemms(path) if "/layer." in name and "/self/MatMul" not in name]


def prove(path: Path, backend: str, folder: Path, **asked) -> EngineResult:
    options = {"profiles": [PROFILE], "expected_gemms": linears(path), "expected_attention": 0}
    return build(path, folder / "x.engine", backend=backend, **options, **asked)


def feeds(model, rows: int = 2, length: int = 16) -> dict:
    random = np.random.default_rng(0)
    ids = random.integers(5, 20, (rows, length))
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    given["attention_mask"][1, 9:] = 0
    return {name: given[name] for name in model.inputs}


@pytest.mark.parametrize(("asked", "streams"), [({}, 1), ({"times_streams": True}, 3)])
def test_streams_are_timed_for_the_engine_of_a_run_alone(asked, streams, graphs, tmp_path, monkeypatch):
    monkeypatch.setattr(builds, "choose_streams", lambda *_: 3)
    prove(graphs["onnxruntime"], "onnxruntime", tmp_path, **asked)
    assert read_sidecar(tmp_path / "x.engine").streams == streams


@pytest.mark.parametrize("backend", cpus.BACKENDS)
def test_every_linear_is_proven_and_answers_are_those_of_the_graph(backend, graphs, tmp_path):
    path = graphs[backend]
    found = prove(path, backend, tmp_path)
    assert (found.int8_gemms, found.not_int8) == (12, [])
    loaded = compile_model(backend, (tmp_path / "x.engine").read_bytes(), blob=True, compute="fp32")
    exact = session_of(path.read_bytes(), "graph").run(None, feeds(loaded))[0]
    made = loaded.run(feeds(loaded))["logits"]
    # a code may be rounded to its neighbor
    assert np.abs(made - exact).max() < 0.05 * np.abs(exact).max()
    again = loaded.run(feeds(loaded))["logits"]
    assert (made == again).all()


def test_a_graph_for_another_backend_is_caught(graphs, tmp_path):
    """FP16 compute: ONNX Runtime runs it, and every linear in floating point."""
    found = prove(graphs["tensorrt_rtx"], "onnxruntime", tmp_path)
    assert (found.int8_gemms, len(found.not_int8)) == (0, 12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_products_are_named_and_are_not_int8(backend, tiny_bert, tmp_path):
    path = tmp_path / "fp32.onnx"
    twin = ExportSettings.of(recipe_with("bert-int8-linears"), backend, "fp32")
    plan = quantized(tiny_bert).plan
    onnx.save(finish_graph(trace(load_model(str(tiny_bert)), 20), plan, twin), path)
    model = compile_model(backend, path.read_bytes(), blob=False, compute="fp32")
    warm_up(model, (2, 16))
    rows = [kernel.row for kernel in model.kernels()]
    name_products(rows, onnx.load(path))
    products = [row for row in rows if row.kind in ("gemm", "attention")]
    assert {*list_gemms(path)} <= {name for row in products for name in row.onnx}
    assert not any(map(is_int8, products))


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_have_times_and_datatypes(backend, graphs):
    model = compile_model(backend, graphs[backend].read_bytes(), blob=False, compute="fp32", profile=True)
    model.run(feeds(model))
    model.run(feeds(model))
    kernels = model.kernels()
    int8 = ["Int8"], ["UInt8"]
    gemms = [each for each in kernels if each.row.kind == "gemm" and each.row.constants[:1] in int8]
    assert len(gemms) == 12
    assert {*gemms[0].row.inputs} <= {"Int8", "UInt8"}
    assert sum(kernel.ms for kernel in kernels) > 0
    assert all(kernel.row.kernel for kernel in gemms)


def test_kernels_of_onnx_runtime_are_those_of_a_run_with_its_memory(monkeypatch, tmp_path):
    """The second run allocates what the first one planned: Transposes took seven times as long."""

    class Session:
        def __init__(self, *_, **__):
            self.events = []

        def run(self, *_):
            event = {"cat": "Node", "name": "a_kernel_time", "args": {"op_name": "Add"}}
            self.events.append({**event, "dur": [9000, 7000, 1000][len(self.events)]})

        def end_profiling(self):
            (path := tmp_path / "profile.json").write_text(json.dumps(self.events))
            return path

    graph = model_of([onnx.helper.make_node("Add", ["x", "x"], ["y"], name="a")], {"x": [4]}, {"y": [4]})
    model = compile_model("onnxruntime", graph.SerializeToString(), blob=False, compute="fp32")
    monkeypatch.setattr(cpu_runtimes, "_session", Session)
    assert [kernel.ms for kernel in model.kernels()] == [1.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_graph_and_no_engine_is_refused(backend):
    with pytest.raises(UserError, match="refuses this graph"):
        compile_model(backend, b"no graph", blob=False, compute="fp32")
    with pytest.raises(MissingDevice, match="cannot load this engine here"):
        compile_model(backend, b"no engine", blob=True, compute="fp32")


def test_a_profile_of_one_length_fixes_the_graph(graphs):
    model = compile_model(
        "openvino", graphs["openvino"].read_bytes(), blob=False, compute="fp32", fixed=(None, 16)
    )
    assert {takes.shape for takes in model.inputs.values()} == {(None, 16)}
    with pytest.raises(RuntimeError):
        model.run(feeds(model, length=32))


@pytest.mark.parametrize(
    ("backend", "features", "precision", "compute"),
    [
        ("openvino", ("avx512_bf16",), "fp16", "bf16"),
        ("openvino", ("amx_bf16",), "fp32", "fp32"),
        ("openvino", ("avx2",), "fp16", "fp32"),
        ("onnxruntime", ("avx512_bf16",), "fp16", "fp32"),
    ],
)
def test_half_precision_is_bf16_where_the_cpu_has_it(backend, features, precision, compute):
    assert choose_compute(backend, Cpu("a CPU", 2, features), precision) == compute


@pytest.mark.parametrize(
    ("features", "best"), [(("avx2",), "onnxruntime"), (("avx2", "avx_vnni"), "openvino"), ((), "openvino")]
)
def test_auto_takes_no_runtime_that_saturates(features, best, monkeypatch):
    monkeypatch.setattr(backend_module, "find_cpu", lambda: Cpu("a CPU", 2, features))
    assert backend_module.find_best(CPU_BACKENDS) == best
    monkeypatch.setattr(backend_module, "find_spec", lambda name: None if name == best else name)
    assert backend_module.find_best(CPU_BACKENDS) != best


def test_weights_are_uint8_where_sums_would_saturate(graphs, monkeypatch):
    monkeypatch.setattr(cpu_runtimes, "find_cpu", lambda: Cpu("old", 2, ("avx2",)))
    model = compile_model("onnxruntime", graphs["onnxruntime"].read_bytes(), blob=False, compute="fp32")
    model.run(feeds(model))
    rows = [kernel.row for kernel in model.kernels() if kernel.row.kernel == "MatMulIntegerToFloat"]
    assert {row.constants[0] for row in rows} == {"UInt8"}


def row(name: str, kind: str, nodes: list[str]) -> LayerRow:
    return LayerRow(name=name, kind=kind, onnx=nodes, inputs=[], constants=[], outputs=[], kernel="k")


def test_a_product_of_two_activations_keeps_a_name_like_openvinos():
    """PyTorch's exporter named nodes so, too, and no weight has a name for this one."""
    nodes = [
        onnx.helper.make_node("MatMul", ["a", "b"], ["c"], name="MatMul_7"),
        onnx.helper.make_node("Softmax", ["c"], ["d"], name="Softmax_8"),
    ]
    graph = model_of(nodes, {"a": [4, 4], "b": [4, 4]}, {"d": [4, 4]})
    model = compile_model("openvino", graph.SerializeToString(), blob=False, compute="fp32")
    assert [each.row.onnx for each in model.kernels() if each.row.kind == "gemm"] == [["MatMul_7"]]


def test_only_a_gemm_gets_the_product_of_its_weight():
    """A row of another kind may name the weight, such as its conversion."""
    graph = model_of([onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="/dense/MatMul")], {}, {})
    rows = [row("convert", "Convert", ["w"]), row("dense", "gemm", ["w"])]
    name_products(rows, graph)
    assert [each.onnx for each in rows] == [["w"], ["/dense/MatMul"]]


def test_a_product_without_a_name_goes_to_what_it_feeds():
    helper = onnx.helper
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["c"], name="/self/MatMul"),
        helper.make_node("Mul", ["c", "s"], ["d"], name="/self/Mul"),
        helper.make_node("Softmax", ["d"], ["p"], name="/self/Softmax"),
        helper.make_node("MatMul", ["p", "v"], ["o"], name="/self/MatMul_1"),
        helper.make_node("MatMul", ["o", "w"], ["x"], name="/dense/MatMul"),
    ]

    rows = [
        row("attention", "attention", ["/self/Softmax", "/self/MatMul_1"]),
        row("elsewhere", "Eltwise", ["/self/Mul"]),
    ]
    name_products(rows, model_of(nodes, {}, {}))
    assert rows[0].onnx == ["/self/Softmax", "/self/MatMul_1", "/self/MatMul"]
    assert rows[1].onnx == ["/self/Mul"]
