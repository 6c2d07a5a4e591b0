"""What the engine shim uses of the API is in TensorRT 10.16, TensorRT 11.4 and the installed TensorRT-RTX.

TensorRT itself is far too large to fetch for this. Its bindings alone (tools/fetch_bindings.sh) import over
stub libraries that export the few C symbols they link to, which is enough to look at classes, enum members
and signatures.
"""

import ast
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
MODULES = ("backend", "runtime/engine", "profiles")
SOURCES = [ROOT / "quantize" / "engine" / f"{name}.py" for name in MODULES]
DEPLOYED = ROOT / "quantize" / "standalone" / "runtimes.py"  # of scripts for users
VERSIONS = ["10.16.0.72", "11.4.0.106"]
SYMBOLS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
CLASSES = {  # variable in the sources: class of the API
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "inspector": "EngineInspector",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "parser_error": "ParserError",
    "profile": "IOptimizationProfile",
    "runtime": "Runtime",
    "runtime_cache": "IRuntimeCache",
    "runtime_config": "IRuntimeConfig",
    "severity": "ILogger.Severity",
    "tensor": "ITensor",
    "timing_cache": "ITimingCache",
}
RTX_ONLY = {
    "CudaGraphStrategy",
    "CudaGraphStrategy.DISABLED",
    "ComputeCapability",
    "ComputeCapability.CURRENT",
    "ComputeCapability.__members__",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "IRuntimeCache.deserialize",
    "IRuntimeCache.serialize",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeConfig.set_runtime_cache",
    "DynamicShapesKernelSpecializationStrategy",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
}
RTX_CODE = {"_set_target", "RuntimeCache"}  # what is called for TensorRT-RTX only
PROBE = """
import functools, importlib, json, sys
name, folder, paths = sys.argv[1], sys.argv[2], sys.argv[3:]
sys.path.insert(0, folder)
trt = importlib.import_module(name)
found = {}
for path in paths:
    try:
        item = functools.reduce(getattr, path.split("."), trt)
    except AttributeError:
        continue
    found[path] = {"doc": getattr(item, "__doc__", None) or "", "read_only": getattr(item, "fset", 0) is None}
json.dump({"version": trt.__version__, "found": found}, sys.stdout)
"""


class Call(NamedTuple):
    path: str
    positional: int
    keywords: tuple[str, ...]


def dotted(node: ast.AST) -> str | None:
    """`trt.A.B` as `A.B`, `config.x` as `IBuilderConfig.x`; None for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or not parts or node.id not in {"trt", *CLASSES}:
        return None
    return ".".join(([] if node.id == "trt" else [CLASSES[node.id]]) + parts[::-1])


@functools.cache
def tree() -> ast.Module:
    return ast.parse("\n".join(path.read_text(encoding="utf-8") for path in (*SOURCES, DEPLOYED)))


def used() -> set[str]:
    """Every dotted path of the API in the source."""
    return paths_in(tree())


def paths_in(part: ast.AST) -> set[str]:
    return {path for node in ast.walk(part) if (path := dotted(node))}


def assigned() -> set[str]:
    nodes = (node for node in ast.walk(tree()) if isinstance(node, ast.Assign))
    return {p for node in nodes for t in node.targets if isinstance(t, ast.Attribute) and (p := dotted(t))}


def calls() -> list[Call]:
    found = []
    for node in ast.walk(tree()):
        if isinstance(node, ast.Call) and (path := dotted(node.func)):
            own = len(node.args) - path.endswith("__init__")  # Base.__init__(self)
            found.append(Call(path, own, tuple(word.arg or "**" for word in node.keywords)))
    return found


def overrides() -> dict[str, list[str]]:
    """Parameters of each method that overrides one of an API class."""
    found = {}
    for node in ast.walk(tree()):
        if isinstance(node, ast.ClassDef) and node.bases and (base := dotted(node.bases[0])):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                    found[f"{base}.{item.name}"] = [argument.arg for argument in item.args.args[1:]]
    return found


def signatures(doc: str) -> list[list[tuple[str, bool]]]:
    """(parameter, optional) without self, of each overload in a pybind11 docstring."""
    found = []
    for text in re.findall(r"^(?:\d+\. )?\w+\((self: .*)\) -> ", doc, re.MULTILINE):
        while (shorter := re.sub(r"\[[^\[\]]*\]|\([^()]*\)", "", text)) != text:  # commas of inner types
            text = shorter  # noqa: PLW2901
        names = [part.strip() for part in text.split(",")][1:]
        found.append([(part.split(":")[0].strip(), "=" in part) for part in names])
    return found


def accepts(parameters: list[tuple[str, bool]], call: Call) -> bool:
    rest = parameters[call.positional :]
    given = {name for name, _ in rest if name in call.keywords}
    missing = [name for name, optional in rest if not optional and name not in given]
    return call.positional <= len(parameters) and given == set(call.keywords) and not missing


@pytest.fixture(scope="session")
def stubs(tmp_path_factory) -> Path:
    """Libraries that the bindings of TensorRT 10 and 11 link to."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the stub libraries with")
    folder = tmp_path_factory.mktemp("stubs")
    source = folder / "stub.c"
    source.write_text("\n".join(f"void *{name}(void) {{ return 0; }}" for name in SYMBOLS))
    empty = folder / "empty.c"
    empty.write_text("")
    for major in (10, 11):
        for library in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
            name = f"lib{library}.so.{major}"
            code = source if library == "nvinfer" else empty
            subprocess.run(
                ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, code], check=True
            )
    return folder


def probe(module: str, folder: Path, libraries: str) -> dict:
    """Look up every path that is used, in a fresh interpreter."""
    paths = sorted({*used(), *overrides(), *(f"{call.path}.__init__" for call in calls())})
    command = [sys.executable, "-c", PROBE, module, str(folder), *paths]
    environment = os.environ | ({"LD_LIBRARY_PATH": libraries} if libraries else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session", params=[*VERSIONS, "tensorrt_rtx"])
def binding(request) -> dict:
    if request.param == "tensorrt_rtx":
        if importlib.util.find_spec("tensorrt_rtx") is None:
            pytest.skip("tensorrt_rtx is not installed")
        return probe("tensorrt_rtx", Path(), "")
    folder = ROOT / ".bindings" / request.param
    tag = "Tag: cp{}{}-".format(*sys.version_info[:2])
    wheels = list(folder.glob("*.dist-info/WHEEL"))
    if not wheels or tag not in wheels[0].read_text():
        pytest.skip(f"no bindings of TensorRT {request.param} for this Python; run tools/fetch_bindings.sh")
    answer = probe("tensorrt_bindings", folder, str(request.getfixturevalue("stubs")))
    assert answer["version"] == request.param
    return answer


def test_the_source_is_understood():
    """Else a new variable or another spelling would escape the tests below."""
    known = {"Builder", "NetworkDefinitionCreationFlag.STRONGLY_TYPED", "IOptimizationProfile.set_shape"}
    assert known <= used()
    guarded = [node for node in tree().body if getattr(node, "name", "") in RTX_CODE]
    assert len(guarded) == len(RTX_CODE)
    assert set.union(*map(paths_in, guarded)) >= RTX_ONLY
    assert not {path for node in tree().body if node not in guarded for path in paths_in(node)} & RTX_ONLY
    bound = [(node.targets[0], node.value) for node in ast.walk(tree()) if isinstance(node, ast.Assign)]
    names = {
        name.id for name, value in bound if isinstance(name, ast.Name) and any(map(dotted, ast.walk(value)))
    }
    nodes = [node for node in ast.walk(tree()) if isinstance(node, ast.Attribute)]
    others = {node.attr for node in nodes if ast.unparse(node.value) in names - {*CLASSES}}
    assert others <= {*dir(dict), *dir(list), *dir(str), "QdqError"}
    loops = [node for node in ast.walk(tree()) if isinstance(node, (ast.For, ast.comprehension))]
    handles = {ast.unparse(node.target) for node in loops if ast.unparse(node.iter) in ("errors", "tensors")}
    assert handles == {"parser_error", "tensor"}
    functions = {node.name: node for node in ast.walk(tree()) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree()):
        if isinstance(node, ast.Call) and (function := functions.get(ast.unparse(node.func))):
            passed = zip(map(ast.unparse, node.args), (item.arg for item in function.args.args), strict=False)
            assert all(argument == name for argument, name in passed if argument in {"trt", *CLASSES})
    modules = [node for node in ast.walk(tree()) if isinstance(node, ast.Attribute) and node.attr == "module"]
    inner = [node for node in ast.walk(tree()) if isinstance(node, ast.Attribute) and node.value in modules]
    assert not inner, "use `trt = backend.module`, which the tests can follow"


def test_nothing_is_missing(binding):
    wanted = used() if "ComputeCapability.CURRENT" in binding["found"] else used() - RTX_ONLY
    assert wanted - set(binding["found"]) == set()


def test_only_rtx_has_what_is_used_for_rtx_only(binding):
    here = RTX_ONLY & set(binding["found"])
    assert here == (set() if binding["version"] in VERSIONS else RTX_ONLY)


def test_calls_fit_the_signatures(binding):
    checked = 0
    for call in calls():
        found = binding["found"].get(call.path)
        constructor = binding["found"].get(f"{call.path}.__init__")
        options = signatures((found or {}).get("doc", "")) or signatures((constructor or {}).get("doc", ""))
        if found is None:
            assert call.path in RTX_ONLY
            continue
        assert options, f"{call.path} has no signature"
        assert any(accepts(parameters, call) for parameters in options), (call, options)
        checked += 1
    assert checked >= 40 - len(RTX_ONLY)


def test_overrides_have_the_parameters_of_their_base(binding):
    assert len(overrides()) == 5
    for path, names in overrides().items():
        options = signatures(binding["found"][path]["doc"])
        assert [[name for name, _ in parameters] for parameters in options] == [names]


def test_assigned_attributes_can_be_set(binding):
    assert {"IBuilderConfig.profiling_verbosity", "IBuilderConfig.progress_monitor"} <= assigned()
    for path in assigned() & set(binding["found"]):
        assert not binding["found"][path]["read_only"]


@pytest.mark.parametrize(
    ("positional", "keywords", "fits"),
    [(2, "", True), (1, "b", True), (3, "", True), (1, "", False), (4, "", False), (2, "d", False)],
)
def test_signature_reading(positional, keywords, fits):
    doc = "x(self: m.A, a: m.B, b: dict[str, int], c: int = 0) -> None\n\n    Text (with: words)\n"
    assert accepts(signatures(doc)[0], Call("x", positional, tuple(keywords))) is fits
