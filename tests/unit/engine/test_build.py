import ctypes
import importlib
import importlib.util
import json
import re
import types
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqbench.quantize.engine import backend as trt
from qdqbench.quantize.engine import build as module
from qdqbench.quantize.engine import sidecar
from qdqbench.quantize.engine.backend import BuiltEngine, available_backends, build_engine, choose_backend
from qdqbench.quantize.engine.build import build, list_gemms, require_int8
from qdqbench.quantize.engine.cuda.compile import get_version
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.graph.index import prune, rename_tensors
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.system import gpu
from qdqbench.quantize.utils.system.cpu import Cpu
from qdqbench.quantize.utils.system.gpu import Gpu
from qdqbench.quantize.utils.system.process import interruption

from ...support import tiny_bert as tiny
from ...support.tiny_layer import give, store

PROFILES = [Profile((1, 16), (8, 32), (16, 64))]
LAYER = "/bert/encoder/layer.{}"
LINEARS = ["/" + name.replace(".", "/").replace("layer/", "layer.") + "/MatMul" for name in tiny.LINEARS]
PRODUCTS = [f"{LAYER.format(n)}/attention/self/{name}" for n in range(2) for name in ("MatMul", "MatMul_1")]
KINDS = ("int8", "int8 attention", "fp16", "weights only", "activations only", "wrong axis", "zero")


def write(folder: Path, kind: str, path: Path) -> Path:
    """Write the graph of a recipe, with all of its Q/DQ on weights or on activations changed or dropped."""
    if kind == "fp16":
        onnx.save(tiny.twin(folder), path)
        return path
    graph = tiny.exported(folder, "bert-int8-attention" if "attention" in kind else "bert-int8-linears")
    before = {name: node for node in graph.graph.node for name in node.output}
    dropped: dict[str, str] = {}
    for node in [node for node in graph.graph.node if node.op_type == "DequantizeLinear"]:
        codes, scale, zero = node.input
        if "/weight_quantizer/" not in node.name:
            dropped |= {node.output[0]: before[codes].input[0]} if kind == "weights only" else {}
        elif kind == "zero":
            store(graph, scale, 0 * tiny.tensor(graph, scale))
        elif kind == "wrong axis":
            columns = tiny.tensor(graph, codes).shape[1]
            store(graph, scale, np.full(columns, 0.01))
            store(graph, zero, np.zeros(columns))
            node.attribute[0].i = 1
        elif kind == "activations only":
            value = tiny.tensor(graph, codes) * tiny.tensor(graph, scale)[:, None]
            dropped[node.output[0]] = give(graph, f"{codes}_float", value, np.float32)
    rename_tensors(graph.graph.node, dropped)
    prune(graph)
    onnx.save(graph, path)
    return path


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """Ahead of time on any machine."""
    monkeypatch.setattr(trt, "find_gpu", lambda: None)
    monkeypatch.setattr(sidecar, "find_gpu", lambda: None)


@pytest.fixture(scope="module")
def models(tiny_bert, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write(tiny_bert, kind, folder / f"{kind}.onnx") for kind in KINDS}


@pytest.fixture
def rtx() -> trt.Backend:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt_rtx is not installed")
    return choose_backend("tensorrt_rtx")


@pytest.fixture
def make(tmp_path, models, rtx):
    """Build one kind of model in tmp_path."""

    def run(kind: str, expected=LINEARS, attention: int = 0, **options):
        values = {"backend": "tensorrt_rtx", "profiles": PROFILES, "expected_gemms": expected} | options
        return build(models[kind], tmp_path / "out" / "x.engine", expected_attention=attention, **values)

    return run


def test_every_linear_runs_in_int8(make):
    result, again = make("int8"), make("int8")
    assert result.model_dump(exclude={"bytes"}) == again.model_dump(exclude={"bytes"})
    assert (result.int8_gemms, result.expected_int8_gemms, result.not_int8) == (12, 12, [])
    assert (result.attention_fused, result.attention_int8) == (2, 0)
    built = result.backend, result.compute_capability, result.ahead_of_time
    assert built == ("tensorrt_rtx", ["8.9"], True)
    require_int8(result)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("fp16", "no Q/DQ pair reaches both of its inputs"),
        ("activations only", "no Q/DQ pair reaches both of its inputs"),
        ("weights only", "after dequantizing its weights"),
        ("wrong axis", "after dequantizing both"),
    ],
)
def test_what_the_parser_takes_and_does_not_run_in_int8_is_caught(make, kind, reason):
    result = make(kind)
    assert result.int8_gemms == 0
    assert result.not_int8 == sorted(LINEARS)
    with pytest.raises(CheckFailed, match="12 GEMMs that should be in INT8 are not") as caught:
        require_int8(result)
    assert all(name in str(caught.value) for name in LINEARS)
    assert reason in str(caught.value)
    assert "qdqbench check" in str(caught.value)


def test_int8_attention(make):
    result = make("int8 attention", [*LINEARS, *PRODUCTS], attention=2)
    assert (result.int8_gemms, result.attention_fused, result.attention_int8) == (16, 2, 2)
    require_int8(result)


def test_an_attention_that_is_not_int8_is_caught(make):
    with pytest.raises(CheckFailed, match=r"0 of 2 attentions run as one INT8 kernel \(2 are fused at all\)"):
        require_int8(make("int8", attention=2))


def test_two_profiles_count_once(make):
    result = make("int8 attention", attention=2, profiles=[*PROFILES, Profile((1, 16), (1, 64), (1, 64))])
    assert (result.profiles, len(result.layers) > 1.5 * result.kernels) == (2, True)
    assert (result.int8_gemms, result.not_int8, result.attention_int8) == (12, [], 2)


def test_files_beside_the_engine(make, tmp_path, models):
    result = make("int8", compute_capability="12.0")
    sidecar = check_sidecar(tmp_path / "out" / "x.engine", models["int8"])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["layers.json", "x.engine", "x.engine.json"]
    assert (tmp_path / "out" / "x.engine").stat().st_size == sidecar.engine_bytes == result.bytes
    assert (sidecar.compute_capability, sidecar.profiles) == (["12.0"], PROFILES)
    assert (sidecar.gpu, sidecar.driver, sidecar.onnx) == (None, None, "int8.onnx")
    layers = json.loads((tmp_path / "out" / "layers.json").read_text())["layers"]
    assert layers == [row.model_dump() for row in result.layers]


def test_every_difference_from_the_sidecar_is_named(make, tmp_path, models, monkeypatch):
    make("int8")
    engine = tmp_path / "out" / "x.engine"
    engine.write_bytes(b"other")
    monkeypatch.setattr(sidecar, "available_backends", lambda: {"tensorrt_rtx": "1.0"})
    monkeypatch.setattr(sidecar, "find_gpu", lambda: Gpu("T4", "7.5", "580.1"))
    with pytest.raises(UserError) as caught:
        check_sidecar(engine, models["fp16"])
    parts = ("not the one that was built", "another fp16.onnx", "has version 1.0", "8.9 and the T4 has 7.5")
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), ("{", "not valid JSON"), ("{}", "no engine sidecar")]
)
def test_a_bad_sidecar_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "x.engine.json").write_text(content)
    with pytest.raises(UserError, match=message):
        check_sidecar(tmp_path / "x.engine")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("zero", {}, r"layer\.0/attention/self/query/weight_quantizer/DequantizeLinear.*calibrate again"),
        ("int8", {"expected": ["/layer.9/MatMul"]}, r"has no MatMul or Gemm named /layer\.9/MatMul"),
        ("int8", {"compute_capability": "9.0"}, r"cannot build .* '9\.0'; it builds for 7\.5"),
        ("int8", {"profiles": []}, "dynamic inputs and no engine shapes"),
        ("int8", {"backend": "onednn"}, "unknown; use auto"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(make, tmp_path, kind, options, message):
    with pytest.raises(UserError, match=message):
        make(kind, **options)
    assert not (tmp_path / "out").exists()


def test_all_parser_errors_are_listed(tmp_path, models, rtx):
    model = onnx.load(models["fp16"])
    for node in model.graph.node:
        node.op_type = "Nonsense" if node.op_type == "Gelu" else node.op_type
    onnx.save(model, tmp_path / "x.onnx")
    with pytest.raises(UserError, match="standard ONNX operators") as caught:
        build_engine(tmp_path / "x.onnx", rtx, PROFILES)
    assert all(
        f"{LAYER.format(n)}/intermediate/intermediate_act_fn/Gelu (Nonsense)" in str(caught.value)
        for n in (0, 1)
    )


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "holds no graph"), (1, "refuses"), (None, "does not exist"), (20_000, "truncated or not ONNX")],
)
def test_a_file_that_is_not_onnx(tmp_path, models, rtx, size, message):
    path = tmp_path / "x.onnx"
    if size is not None:
        path.write_bytes(models["int8"].read_bytes()[:size])
    with pytest.raises(UserError, match=message):
        build_engine(path, rtx, PROFILES)
    with pytest.raises(UserError):
        list_gemms(path)


def test_nodes_of_one_name_are_refused(make, models, tmp_path, rtx):
    model = onnx.load(models["int8"])
    twins = [node for node in model.graph.node if node.name in LINEARS][:2]
    twins[1].name = twins[0].name
    onnx.save(model, tmp_path / "x.onnx")
    wanted = {"expected_gemms": [twins[0].name], "expected_attention": 0}
    with pytest.raises(UserError, match=r"several MatMul or Gemm nodes named '.*self/query/MatMul'"):
        build(tmp_path / "x.onnx", tmp_path / "x.engine", backend="auto", profiles=PROFILES, **wanted)


@pytest.mark.parametrize(("shape", "fits"), [((16, None), False), ((8, 32), False), ((4, 16), True)])
def test_fixed_input_shapes(tmp_path, models, rtx, shape, fits):
    model, path = onnx.load(models["fp16"]), tmp_path / "x.onnx"
    for value in model.graph.input:
        for axis, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
            if size:  # else it stays dynamic
                axis.dim_value = size
    onnx.save(model, path)
    profile = Profile((4, 16), (4, 16), (4, 16))
    if fits:
        assert build_engine(path, rtx, [profile]).data
    else:
        with pytest.raises(UserError, match="is fixed at"):
            build_engine(path, rtx, [profile])


def test_progress(models, rtx):
    seen: list[tuple[str, float]] = []
    build_engine(models["fp16"], rtx, PROFILES, progress=lambda *step: seen.append(step))
    assert len({phase for phase, _ in seen}) > 1
    assert all(0 < fraction <= 1 for _, fraction in seen)


def test_an_interrupt_cancels_the_build_and_the_next_one_works(models, rtx):
    def interrupt(phase: str, fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(models["fp16"], rtx, PROFILES, progress=interrupt)
    assert build_engine(models["fp16"], rtx, PROFILES).layers


def fake_engine(**fields) -> BuiltEngine:
    values = {"data": b"x", "layers": [], "backend": "tensorrt", "version": "11.4", "seconds": 1.0}
    values |= {"compute_capability": ["8.9"], "ahead_of_time": False}
    return BuiltEngine(**(values | fields))


def test_without_a_layer_table_nothing_is_proven(make, monkeypatch):
    monkeypatch.setattr(module, "build_engine", lambda *args, **options: fake_engine())
    with pytest.raises(UserError, match="no layer table"):
        make("int8")
    assert make("int8", strict=False).not_int8 == sorted(LINEARS)


def test_the_inspector_is_preferred_to_the_log(make, monkeypatch):
    gemm = {"LayerType": "gemm", "Inputs": [{"Format/Datatype": "Int8"}], "Outputs": []}
    layers = [{"Name": f"{name}_myl0_1"} | gemm for name in LINEARS]
    target = trt._set_target
    monkeypatch.setattr(trt, "_set_target", lambda *given: (target(*given)[0], False))  # of this GPU
    monkeypatch.setattr(trt, "inspect_engine", lambda *_: json.dumps({"Layers": layers, "Bindings": []}))
    result = make("int8")
    assert ([row.name for row in result.layers], result.not_int8) == ([row["Name"] for row in layers], [])


@pytest.mark.parametrize(
    "shapes", [((0, 1), (1, 1), (1, 1)), ((1, 9), (1, 8), (1, 9)), ((2, 1), (2, 1), (1, 1))]
)
def test_profiles_must_be_ordered(shapes):
    with pytest.raises(UserError, match="1 <= min <= opt <= max"):
        Profile(*shapes)


@pytest.fixture
def installed(monkeypatch):
    """Replace the backends that import: a version, an exception, or absent."""

    def install(**answers: str | Exception) -> None:
        def fake(name: str) -> types.SimpleNamespace:
            answer = answers.get(name, ModuleNotFoundError(f"No module named {name!r}", name=name))
            if isinstance(answer, Exception):
                raise answer
            return types.SimpleNamespace(__version__=answer)

        monkeypatch.setattr(importlib, "import_module", fake)
        monkeypatch.setattr(trt, "find_spec", answers.get)

    return install


@pytest.mark.parametrize(
    ("here", "device", "chosen"),
    [
        ({"tensorrt": "10.16", "tensorrt_rtx": "1.7"}, True, "tensorrt"),
        ({"tensorrt": "10.16", "onnxruntime": "1.31", "openvino": "2026.4"}, False, "openvino"),
        ({"tensorrt_rtx": "1.7", "onnxruntime": "1.31"}, False, "onnxruntime"),
        ({"tensorrt_rtx": "1.7"}, True, "tensorrt_rtx"),
    ],
)
def test_auto_takes_tensorrt_for_a_gpu_and_a_cpu_runtime_without(
    installed, monkeypatch, here, device, chosen
):
    installed(**here)
    monkeypatch.setattr(trt, "find_gpu", lambda: Gpu("L4", "8.9", None) if device else None)
    monkeypatch.setattr(trt, "find_cpu", lambda: Cpu("with VNNI", 2, ("avx512_vnni",)))
    assert (choose_backend("auto").name, choose_backend("auto").version) == (chosen, here[chosen])
    assert available_backends() == here | {"cuda": get_version()}


@pytest.mark.parametrize(
    ("name", "here", "message"),
    [
        ("tensorrt_rtx", {}, re.escape(f"tensorrt_rtx is not installed; {install_command('rtx')}")),
        ("openvino", {}, re.escape(f"openvino is not installed; {install_command('openvino')}")),
        ("tensorrt", {}, re.escape(f"tensorrt is not installed; {install_command('tensorrt')}")),
        ("tensorrt", {"tensorrt": "11.4"}, "only on the GPU that runs them"),
        ("tensorrt", {"tensorrt": OSError("libnvinfer.so.11: not found")}, "does not import.*libnvinfer"),
        ("tensorrt", {"tensorrt": ModuleNotFoundError("no", name="tensorrt_libs")}, "does not import"),
    ],
)
def test_a_backend_that_cannot_build_is_a_missing_device(installed, name, here, message):
    installed(**here)
    with pytest.raises(MissingDevice, match=message):
        choose_backend(name)


def test_a_broken_install_is_reported_and_the_others_listed(installed):
    installed(tensorrt=OSError("libnvinfer.so.11: not found"), tensorrt_rtx="1.7")
    with pytest.warns(RuntimeWarning, match="tensorrt is installed but does not import"):
        assert available_backends() == {"tensorrt_rtx": "1.7", "cuda": get_version()}


def test_an_import_that_ctrl_c_stopped_is_no_broken_install(installed):
    installed(tensorrt=ImportError("initialization failed"))
    with pytest.raises(KeyboardInterrupt):
        interruption.receive(2, None)
    with pytest.raises(KeyboardInterrupt):
        available_backends()


def test_tensorrt_builds_for_the_gpu_at_hand_only(models):
    backend = trt.Backend("tensorrt", "11.4", None, Gpu("L4", "8.9", None))
    with pytest.raises(UserError, match=r"builds only for the GPU at hand \(8\.9\), not for 7\.5"):
        trt._set_target(None, backend, "7.5")
    assert trt._set_target(None, backend, None) == (["8.9"], False)


@pytest.mark.parametrize("missing", ["library", "driver", "device", None])
def test_the_gpu_that_cuda_shows(monkeypatch, tmp_path, missing):
    def write(value: int | bytes):
        def answer(target, *_: object) -> int:
            getattr(target, "_obj", target).value = value
            return 0

        return answer

    cuda = types.SimpleNamespace(
        cuInit=lambda _: 100 if missing == "driver" else 0,
        cuDeviceGetCount=write(0 if missing == "device" else 1),
        cuDeviceGetName=write(b"NVIDIA L4"),
        cuDeviceGetAttribute=lambda target, which, _: write({75: 8, 76: 9}[which])(target),
    )

    def load(name: str) -> types.SimpleNamespace:
        if missing == "library":
            raise OSError(name)
        return cuda

    (tmp_path / "version").write_text("580.65.06\n")
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path / "version")
    assert gpu.find_gpu() == (None if missing else Gpu("NVIDIA L4", "8.9", "580.65.06"))
