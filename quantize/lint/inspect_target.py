"""Find what `inspect` needs: the layer table of a run, an engine or a saved JSON; its graph and recipe."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qdqbench.quantize.engine import backend as trt
from qdqbench.quantize.engine.cuda.file import list_rows, read_file
from qdqbench.quantize.engine.layers import parse_inspector_json, read_table
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.engine.runtime.runners import CompiledEngine
from qdqbench.quantize.engine.sidecar import Sidecar, check_sidecar, sidecar_path
from qdqbench.quantize.graph.index import MATMULS, GraphIndex, find_residuals, module_of
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.lint.inspection import Inspection, inspect_layers, read_graph
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.pipeline.graphs import checked_path, graph_path
from qdqbench.quantize.pipeline.outcomes import BUILD, Skipped, read_built
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.recipe.plan import FLOATS, match_modules, resolve
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, has_profiles
from qdqbench.quantize.utils.schema import read
from qdqbench.quantize.utils.system.gpu import find_gpu


def recipe_modules(onnx_file: Path, recipe: str) -> set[str]:
    """Return the modules whose MatMul and Gemm nodes, or whose residual, the recipe wants in INT8.

    Linears are the modules with a MatMul or Gemm, less the attentions, which have a Softmax. The head
    size is not in the names, so the check of the attention itself judges it.
    """
    loaded, model = load_recipe(recipe), read_model(onnx_file)
    family = family_named(loaded.model.family)
    modules: dict[str, ModuleInfo] = {}
    for node in model.graph.node:
        if node.op_type in MATMULS:
            place = family.place(module := module_of(node.name))
            if place is None or place.path not in family.terms:
                modules.setdefault(module, ModuleInfo("Linear"))
        elif node.op_type == "LayerNormalization":
            modules[module_of(node.name)] = ModuleInfo("LayerNorm")
        elif node.op_type == "Softmax":
            modules[module_of(node.name)] = ModuleInfo("Attention", head_size=64)
            modules[f"{module_of(node.name)}.softmax"] = ModuleInfo("Softmax")
    added = [found.module for found in find_residuals(GraphIndex(model))]
    modules |= {name: ModuleInfo("Residual") for name in added if family.residual_readers(name)}
    prefix = next(iter(modules), "").partition(".")[0]
    around = (name[: dot.start()] for name in modules for dot in re.finditer(r"\.", name))
    modules = dict.fromkeys(around, ModuleInfo("other")) | modules
    kept = (  # embeddings that compute in FP32 are no part of the table
        rule
        for rule in loaded.rules
        if rule.precision not in FLOATS or match_modules(rule, modules, family, prefix)
    )
    plan = resolve(loaded.model_copy(update={"rules": tuple(kept)}), modules, prefix)
    return {*plan.int8, *plan.attention, *plan.residual}


MEASURED = ("gpu", "cpu")  # places where kernel times are measured


@dataclass
class InspectTarget:
    name: str
    layers: list[LayerRow]
    onnx: Path | None = None
    recipe: str | None = None  # shipped name or file
    engine: Path | None = None
    sidecar: Sidecar | None = None
    folder: Path | None = None  # run directory


def open_target(path: Path, onnx: Path | None = None, recipe: str | None = None) -> InspectTarget:
    """Read the layer table of a run directory, an .engine file or a saved JSON.

    Raises:
        UserError: nothing to read, or files that do not belong together.
        MissingDevice: an engine without a saved layer table, and no GPU to load it.
    """
    if path.is_dir():
        target = _run(path)
    elif path.suffix == ".engine":
        target = _engine(path)
    else:
        target = InspectTarget(path.name, read_table(path))
    target.onnx, target.recipe = onnx or target.onnx, recipe or target.recipe
    if recipe and target.onnx is None:
        raise UserError(f"--recipe needs the ONNX graph that {path} was made from; give --onnx FILE")
    return target


def find_checked_graph(path: Path) -> tuple[Path, str | None]:
    if not path.is_dir():
        return path, None
    graph = checked_path(Session(read_config(path), path))
    if not graph.is_file():
        raise UserError(f"{path} has no {graph.name} yet; `qdqbench export {path}` writes it")
    return graph, str(path / "recipe.yaml")


def count_expected(target: InspectTarget) -> tuple[list[str] | None, int]:
    """Return the ONNX GEMMs and the number of attentions that the recipe wants in INT8; (None, 0) without."""
    if target.onnx is None or target.recipe is None:
        return None, 0
    if not load_recipe(target.recipe).quantizes:
        return [], 0
    graph, modules = read_graph(target.onnx), recipe_modules(target.onnx, target.recipe)
    gemms = [name for name in (*graph.linears, *graph.products) if module_of(name) in modules]
    return gemms, sum(module_of(name) in modules for name in graph.softmaxes)


def inspect_target(target: InspectTarget, times: Mapping[str, float] | None = None) -> Inspection:
    """Compare the layers of a target with its graph and recipe."""
    expected, attentions = count_expected(target)
    graph = read_graph(target.onnx) if target.onnx else None
    found = inspect_layers(
        target.layers, graph, expected=expected, expected_attention=attentions, times=times
    )
    names = {"backend", "version", "compute_capability", "ahead_of_time"}
    found.target = target.name
    found.engine = target.sidecar.model_dump(include=names) if target.sidecar else None
    return found


def measure_times(
    target: InspectTarget, place: str, batch: int | None, length: int | None
) -> tuple[dict[str, float], str]:
    """Measure the kernels on this GPU or CPU; return the times and their shape.

    Raises:
        UserError: a saved JSON, which cannot run, or an engine for the other place.
        CheckFailed: no profile takes the shape, or the engine fails.
    """
    import numpy as np

    if target.engine is None:
        raise UserError(f"{target.name} cannot run; give a run directory, an .engine file or a saved profile")
    on_cpu = target.sidecar is not None and target.sidecar.backend in CPU_BACKENDS
    if on_cpu != (place == "cpu"):
        right = "cpu" if on_cpu else "gpu"
        raise UserError(f"the engine of {target.name} runs on a {right.upper()}; give --profile {right}")
    if not on_cpu and find_gpu() is None:
        raise MissingDevice("--profile gpu runs the engine, and CUDA shows no GPU here; give a saved profile")

    profiles = target.sidecar is None or has_profiles(target.sidecar.backend)
    load = Engine if profiles else partial(CompiledEngine, profile=True)
    with load(target.engine, target.onnx) as engine:
        opt = engine.profiles[0].opt
        shape = (batch or opt[0], length or opt[1])
        feeds = {name: np.full(shape, 1 if "mask" in name else 0, dtype=np.int64) for name in engine.inputs}
        return engine.kernel_times(feeds), f"batch {shape[0]}, {shape[1]} tokens"


def _run(folder: Path) -> InspectTarget:
    session = Session(read_config(folder), folder)
    built = read_built(folder)
    if isinstance(built, Skipped):
        raise MissingDevice(f"{folder} has no engine: {built.skipped}")
    table = folder / "layers.json"
    engine = folder / "engine" / built.file
    target = InspectTarget(
        name=str(folder),
        layers=read_table(table if table.is_file() else folder / BUILD),
        onnx=graph_path(session),
        recipe=str(folder / "recipe.yaml"),
        engine=engine,
        sidecar=_sidecar(engine),
        folder=folder,
    )
    _check_graph(target)
    return target


def _engine(path: Path) -> InspectTarget:
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a run directory, an .engine file or a saved JSON")
    sidecar = _sidecar(path)
    folder = path.resolve().parent.parent
    run = folder if (folder / "run.json").is_file() else None
    places = (path.with_name(sidecar.onnx), folder / sidecar.onnx)
    onnx = next((place for place in places if place.is_file()), None)
    recipe = (
        folder / "recipe.yaml" if run and onnx == places[1] and _built_file(folder) == path.name else None
    )
    target = InspectTarget(
        name=str(path),
        layers=_engine_layers(path, sidecar),
        onnx=onnx,
        recipe=str(recipe) if recipe and recipe.is_file() else None,
        engine=path,
        sidecar=sidecar,
        folder=run if recipe else None,
    )
    if onnx:
        _check_graph(target)
    return target


def _engine_layers(path: Path, sidecar: Sidecar) -> list[LayerRow]:
    """Return the saved table that is certainly this engine's; else the inspector's, which needs the GPU."""
    own, folder = path.with_suffix(".layers.json"), path.resolve().parent
    if own.is_file():
        return read_table(own)
    for place in (folder, folder.parent):
        if _built_file(place) == path.name and (place / "layers.json").is_file():
            return read_table(place / "layers.json")
    if (folder / "layers.json").is_file() and len(list(folder.glob("*.engine"))) == 1:
        return read_table(folder / "layers.json")
    if sidecar.backend == "cuda":
        return list_rows(read_file(path).plan)
    if sidecar.backend in CPU_BACKENDS:
        return CompiledEngine(path).kernels()
    if find_gpu() is None:
        raise MissingDevice(
            f"{path} has no saved layer table ({own.name}), and reading it from the engine takes its "
            "GPU; build it again, or inspect it there"
        )
    check_sidecar(path)
    backend = trt.choose_backend(sidecar.backend)  # type: ignore[arg-type]
    with trt.capture(backend.module) as (logger, _):
        text = trt.inspect_engine(backend.module, logger, path.read_bytes())
    if text is None:
        raise MissingDevice(f"{backend.name} {backend.version} cannot load {path}; build it here")
    return parse_inspector_json(text)


def _sidecar(engine: Path) -> Sidecar:
    path = sidecar_path(engine)
    if not path.is_file():
        raise UserError(f"{path} does not exist, so nothing says what {engine.name} is; build it again")
    return read(path, Sidecar, "engine sidecar", "build the engine again")


def _built_file(folder: Path) -> str | None:
    path = folder / BUILD
    built = files.read_json(path) if path.is_file() else None
    name = built.get("file") if isinstance(built, dict) else None
    return name if isinstance(name, str) else None


def _check_graph(target: InspectTarget) -> None:
    """Require the engine's own graph: names of another one would prove nothing about this engine."""
    assert target.onnx is not None
    assert target.sidecar is not None
    if not target.onnx.is_file():
        raise UserError(f"{target.onnx}, which the engine was built from, does not exist; give --onnx FILE")
    if files.sha256(target.onnx) != target.sidecar.onnx_sha256:
        raise UserError(f"{target.engine} was built from another {target.onnx.name}; build it again")
