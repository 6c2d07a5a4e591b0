"""Write a model repository of Triton from a run, and the files that deploy it."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from qdqbench.quantize.deployment.write import read_model_io, render
from qdqbench.quantize.engine.profiles import LENGTH_STEP, Profile
from qdqbench.quantize.engine.sidecar import Sidecar, read_sidecar
from qdqbench.quantize.engine.trtexec import build_options
from qdqbench.quantize.pipeline.artifacts import (
    BUILD,
    Skipped,
    backend_of,
    engine_file,
    engine_profiles,
    graph_for_tensorrt,
    graph_path,
    read_built,
)
from qdqbench.quantize.pipeline.ownership import locked_for_reading
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError

# what the tokenizer tells beside tokens, by the name of the task's kind
EXTRAS = {"token classification": "WORDS", "question answering": "SPANS"}
_TYPES = {
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.FLOAT16: "TYPE_FP16",
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.INT32: "TYPE_INT32",
}


@dataclass(frozen=True)
class Tensor:
    """An input or output as config.pbtxt has it, without the batch."""

    name: str
    type: str
    dims: tuple[int, ...]  # -1: free


@dataclass(frozen=True)
class ModelFacts:
    """Tensors, lengths, batches, texts and labels of one run."""

    tokens: list[Tensor]  # inputs of the graph
    outputs: list[Tensor]  # of the graph
    texts: list[str]  # inputs of the tokenizer
    extras: list[Tensor]  # more outputs of the tokenizer
    labels: list[str]  # of a classifier's output
    words: bool  # texts are words between spaces
    truncation: str  # strategy of `tokenizers`
    pad_id: int
    profiles: list[Profile]
    lengths: list[int]  # that texts are padded to
    max_batch: int  # that the profiles take at each of them


def read_facts(session: Session, graph: Path, profiles: Sequence[Profile]) -> ModelFacts:
    """Return what Triton is told of a run's graph.

    Raises:
        UserError: the profiles take no single row.
    """
    kind = session.config.task.kind
    read = onnx.load(graph, load_external_data=False).graph
    longest = min(session.recipe.export.max_length, max(profile.max[1] for profile in profiles))
    sizes = dict[int, int]()  # most rows of each length
    for wanted in range(LENGTH_STEP, longest + LENGTH_STEP, LENGTH_STEP):
        length = max(min(wanted, longest), min(profile.min[1] for profile in profiles))
        if rows := _most_rows(profiles, length):
            sizes[length] = rows
    if not sizes:
        raise UserError(
            "no profile of the engine takes a batch of one row, and Triton pads no batches; set the smallest "
            "batch of engine.shapes to 1 and build again"
        )
    model_io = read_model_io(session)
    extra = EXTRAS.get(kind.name)
    return ModelFacts(
        tokens=[_tensor(value) for value in read.input],
        outputs=[_tensor(value) for value in read.output],
        texts=["TEXT", "TEXT_PAIR"][: len(model_io.texts)],
        extras=[Tensor(extra, "TYPE_INT64", (-1, 2) if extra == "SPANS" else (-1,))] if extra else [],
        labels=[re.sub(r"\s+", " ", name) for name in model_io.labels if kind is CLASSIFICATION],
        words=model_io.words,
        truncation=model_io.truncation,
        pad_id=session.pad_id,
        profiles=[*profiles],
        lengths=[*sizes],
        max_batch=min(sizes.values()),
    )


def _most_rows(profiles: Sequence[Profile], length: int) -> int:
    """Return the most rows of this length such that some profile takes each batch up to them."""
    most = 0
    for profile in sorted(profiles, key=lambda each: each.min[0]):
        if profile.min[1] <= length <= profile.max[1] and profile.min[0] <= most + 1:
            most = max(most, profile.max[0])
    return most


def _tensor(value: Any) -> Tensor:
    shape = value.type.tensor_type.shape.dim[1:]
    dims = tuple(-1 if axis.dim_param else int(axis.dim_value) for axis in shape)
    return Tensor(value.name, _TYPES[value.type.tensor_type.elem_type], dims)


TRITON = "26.05"  # the release that files name; TRITON=YY.MM takes another
DELAY_US, TIMEOUT_US, QUEUE = 2_000, 10_000_000, 512  # of the encoder's queue
TARGET_US = 20_000  # time in the queue that replicas are added at
ONNX = ("onnxruntime", "openvino")  # backends of Triton that take the run's graph as it is
TEMPLATES = Path(__file__).parent / "templates"
Plan = Literal["built", "script", "none"]
KUBERNETES = ("deployment", "service", "hpa", "prometheus-adapter", "keda")
FOR_ALL = (
    "Dockerfile",
    "compose.yaml",
    "prometheus.yml",
    *(f"kubernetes/{name}.yaml" for name in KUBERNETES),
)
FOR_GPU = ("compose.gpu.yaml", "kubernetes/gpu-patch.yaml")


@dataclass(frozen=True)
class TritonExport:
    """What was written."""

    name: str  # of the ensemble that clients ask
    backend: str  # that it runs on
    ensembles: list[str]
    plan: Plan  # TensorRT's: the run's own, a script that builds it, or the run has no graph for it
    lengths: list[int]
    max_batch: int


def export_triton(folder: Path, out: Path, name: str | None = None) -> TritonExport:
    """Write a run as a Triton model repository.

    Args:
        out: folder to write; one that holds anything is refused.
        name: of the ensemble, and first part of its models' names; None: the run's folder.

    Raises:
        UserError: no run directory with a graph, one that Triton cannot take, or a name with other signs than
            letters, digits and _.
    """
    config = read_config(folder)
    with locked_for_reading(folder):  # else hashes could be those of other bytes than are copied
        return _export(Session(config, folder), out, name)


def _export(session: Session, out: Path, name: str | None) -> TritonExport:
    folder, graph = session.folder, graph_path(session)
    if not graph.is_file():
        raise UserError(f"{folder} has no {graph.name} yet; run `qdqbench build {folder}` first")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is a file or holds files; give an empty or new folder")
    name = _name(folder, name)
    engine, sidecar = _plan(folder, graph)
    profiles = list(sidecar.profiles) if sidecar else engine_profiles(session)
    facts = read_facts(session, graph, profiles)
    for_tensorrt = graph_for_tensorrt(session, graph)
    plan: Plan = "built" if engine else "script" if for_tensorrt else "none"
    on_cpu = "openvino" if backend_of(session.recipe) == "openvino" else "onnxruntime"
    backend = "tensorrt" if plan == "built" else on_cpu
    backends = [*(["tensorrt"] if plan == "built" else []), *ONNX]
    context: dict[str, Any] = {
        **vars(facts),
        "name": name,
        "backend": backend,
        "slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50] or "model",
        "recipe": session.recipe.name,
        "plan": plan,
        "trt_version": sidecar.version if sidecar else None,
        "capability": ", ".join(sidecar.compute_capability) if sidecar else None,
        "triton": TRITON,
        "tokenizers": metadata.version("tokenizers"),
        "numpy": metadata.version("numpy"),
        "ensembles": [name, *(f"{name}_on_{each}" for each in backends)],
        "labelled": bool(facts.labels),
        "names": [each.name for each in (*facts.outputs, *facts.extras)],
        "preferred": sorted({min(profile.opt[0], facts.max_batch) for profile in facts.profiles} - {1}),
        "profile_numbers": [f'"{number}"' for number, _ in enumerate(facts.profiles)],
        "warm": _warm(facts),
        "delay_us": DELAY_US,
        "timeout_us": TIMEOUT_US,
        "queue": QUEUE,
        "target_us": TARGET_US,
    }
    with files.atomic_folder(out, replace=False) as made:
        models = made / "models"
        _write_tokenizer(models, session, context)
        for each in backends:
            source = engine if each == "tensorrt" else graph
            assert source is not None
            _write_encoder(models, facts, context | {"backend": each}, source)
            _write_ensemble(models, f"{name}_on_{each}", facts, context | {"backend": each})
        _write_ensemble(models, name, facts, context)
        if plan == "script":
            assert for_tensorrt is not None
            _write_plan_script(made / "tensorrt", facts, context | {"backend": "tensorrt"}, for_tensorrt)
        _write_deployment(made, context)
    return TritonExport(name, backend, context["ensembles"], plan, facts.lengths, facts.max_batch)


def _name(folder: Path, name: str | None) -> str:
    if name is None:
        return re.sub(r"\W+", "_", folder.resolve().name, flags=re.ASCII).strip("_") or "model"
    if not re.fullmatch(r"\w{1,100}", name, re.ASCII):
        raise UserError(f"--name {name!r} has other signs than letters, digits and _; give another")
    return name


def _plan(folder: Path, graph: Path) -> tuple[Path | None, Sidecar | None]:
    """Return the run's TensorRT engine, where it has one, and the sidecar of any engine."""
    built = read_built(folder) if (folder / BUILD).is_file() else Skipped(skipped="not built")
    if isinstance(built, Skipped):
        return None, None
    engine = engine_file(folder, built)
    sidecar = read_sidecar(engine)
    if built.backend != "tensorrt":
        return None, sidecar  # TensorRT-RTX's engines are none of TensorRT's
    hashes = [files.sha256(path) if path.is_file() else "" for path in (engine, graph)]
    if hashes != [sidecar.engine_sha256, sidecar.onnx_sha256]:  # it need not run on this machine
        raise UserError(
            f"{engine} is not the engine that was built from {graph.name}; `qdqbench build {folder}` makes it"
        )
    return engine, sidecar


def _warm(facts: ModelFacts) -> list[tuple[int, int]]:
    """Return shapes to run before the first request: a row of each length, near each opt, the largest."""
    tuned = [
        (
            min(profile.opt[0], facts.max_batch),
            min(facts.lengths, key=lambda length: abs(length - profile.opt[1])),
        )
        for profile in facts.profiles
    ]
    largest = facts.max_batch, facts.lengths[-1]
    return [*dict.fromkeys([*((1, length) for length in facts.lengths), *tuned, largest])]


def _write_tokenizer(models: Path, session: Session, context: dict[str, Any]) -> None:
    folder = models / f"{context['name']}_tokenizer"
    files.write_text(folder / "config.pbtxt", _render("tokenizer.pbtxt", context))
    source = Path(__file__).with_name("tokenizer_model.py").read_text(encoding="utf-8")
    files.write_text(folder / "1" / "model.py", source)
    tokenizer: Any = session.tokenizer
    files.write_text(folder / "1" / "tokenizer.json", tokenizer.backend_tokenizer.to_str())


def _write_encoder(models: Path, facts: ModelFacts, context: dict[str, Any], source: Path) -> None:
    folder = models / f"{context['name']}_{context['backend']}"
    _write_config(folder, facts, "encoder.pbtxt", context)
    (folder / "1").mkdir()
    shutil.copyfile(
        source, folder / "1" / ("model.plan" if context["backend"] == "tensorrt" else "model.onnx")
    )


def _write_config(folder: Path, facts: ModelFacts, template: str, context: dict[str, Any]) -> None:
    """Write a configuration with the labels and the masks of the warm-up that it names."""
    files.write_text(folder / "config.pbtxt", _render(template, context))
    if facts.labels:
        files.write_text(folder / "labels.txt", "\n".join(facts.labels) + "\n")
    if template == "encoder.pbtxt":
        for length in sorted({length for _, length in context["warm"]}):
            files.write_bytes(folder / "warmup" / f"ones_{length}", np.ones(length, dtype="<i8").tobytes())


def _write_ensemble(models: Path, ensemble: str, facts: ModelFacts, context: dict[str, Any]) -> None:
    _write_config(models / ensemble, facts, "ensemble.pbtxt", context | {"ensemble": ensemble})
    (models / ensemble / "1").mkdir()  # Triton wants a version of every model
    (models / ensemble / "1" / ".keep").touch()  # which copies and images would else leave out


def _write_plan_script(folder: Path, facts: ModelFacts, context: dict[str, Any], graph: Path) -> None:
    """Write what builds the plan elsewhere, and the configurations that then replace those of a CPU."""
    name, inputs = context["name"], {each.name: (-1, -1) for each in facts.tokens}
    options = build_options("model.onnx", "model", inputs, facts.profiles)
    folder.mkdir()
    shutil.copyfile(graph, folder / "model.onnx")
    script = folder / "build_plan.sh"
    files.write_text(script, _render("build_plan.sh", context | {"trtexec": options}))
    script.chmod(0o755)
    _write_config(folder / "models" / f"{name}_tensorrt", facts, "encoder.pbtxt", context)
    for ensemble in (name, f"{name}_on_tensorrt"):
        _write_ensemble(folder / "models", ensemble, facts, context)


def _write_deployment(made: Path, context: dict[str, Any]) -> None:
    for file in (*FOR_ALL, *(() if context["plan"] == "none" else FOR_GPU)):
        files.write_text(made / file, _render(Path(file).name, context))
    for protocol, port, title in (("http", 8000, "HTTP"), ("grpc", 8001, "gRPC")):
        client = context | {"protocol": protocol, "port": port, "title": title}
        files.write_text(made / f"client_{protocol}.py", _render("client.py", client))
    files.write_text(made / "README.md", _render("README.md", context))


def _render(template: str, context: dict[str, Any]) -> str:
    return render(template, context, TEMPLATES, trim=False)
