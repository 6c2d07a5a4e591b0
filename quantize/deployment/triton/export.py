"""Write a model repository of Triton from a run, and the files that deploy it."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx

from qdqbench.quantize.deployment.write import describe_texts, read_labels, render, standalone_modules
from qdqbench.quantize.engine.profiles import LENGTH_STEP, Profile
from qdqbench.quantize.engine.sidecar import Sidecar, read_sidecar
from qdqbench.quantize.engine.trtexec import build_options
from qdqbench.quantize.pipeline import data_profiles, graphs, outcomes
from qdqbench.quantize.pipeline.ownership import locked_for_reading
from qdqbench.quantize.pipeline.pipeline import require_recorded
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.report.formats import clean
from qdqbench.quantize.tasks.types.multilabel import MULTI_LABEL
from qdqbench.quantize.tasks.types.tokens import TOKENS
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError

TRITON = "26.05"  # the release that files name; TRITON=YY.MM takes another
ONNX = ("onnxruntime", "openvino")  # backends of Triton that take the run's graph as it is
TEMPLATES = Path(__file__).parent / "templates"
Plan = Literal["built", "script", "none"]
LIMITS = {
    "delay_us": 2_000,  # of the encoder's queue, as the next two
    "timeout_us": 10_000_000,
    "queue": 512,
    "target_us": 20_000,  # time in the queue that replicas are added at
}
# further outputs of the tokenizer, by the name of the task's kind
EXTRAS: dict[str, dict[str, tuple[int, ...]]] = {
    "token classification": {"WORDS": (-1,)},
    "question answering": {"SPANS": (-1, 2)},
}
TYPES = {
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.FLOAT16: "TYPE_FP16",
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.INT32: "TYPE_INT32",
}


class Tensor(NamedTuple):
    name: str
    type: str
    dims: tuple[int, ...]  # -1: free


@dataclass(frozen=True)
class TritonExport:
    name: str  # of the ensemble that clients ask
    backend: str  # that it runs on
    ensembles: list[str]
    plan: Plan  # TensorRT's: the run's own, a script that builds it, or the run has no graph for it
    lengths: list[int]
    max_batch: int


def export_triton(folder: Path, out: Path, name: str | None = None) -> TritonExport:
    """Write a run as a Triton model repository in a new or empty folder; a `UserError` where that cannot be.

    `name` is the ensemble's, of letters, digits and _, and begins its models' names; None: the run's folder.
    """
    config = read_config(folder)
    with locked_for_reading(folder):  # else hashes could be those of other bytes than are copied
        return _export(Session(config, folder), out, name)


def _export(session: Session, out: Path, name: str | None) -> TritonExport:
    folder, graph = session.folder, graphs.graph_path(session)
    if not graph.is_file():
        raise UserError(f"{folder} has no {graph.name} yet; run `qdqbench build {folder}` first")
    require_recorded(session, graph)
    files.remove_abandoned(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is a file or holds files; give an empty or new folder")
    if name is None:
        name = re.sub(r"\W+", "_", folder.resolve().name, flags=re.ASCII).strip("_") or "model"
    elif not re.fullmatch(r"\w{1,100}", name, re.ASCII):
        raise UserError(f"--name {name!r} has other signs than letters, digits and _; give another")
    engine, sidecar = _find_plan(folder, graph)
    for_tensorrt = graphs.graph_for_tensorrt(session, graph)
    plan: Plan = "built" if engine else "script" if for_tensorrt else "none"
    on_cpu = "openvino" if session.target.backend == "openvino" else "onnxruntime"
    backend = "tensorrt" if engine else on_cpu
    sources = ({"tensorrt": engine} if engine else {}) | dict.fromkeys(ONNX, graph)
    ensembles = [name, *(f"{name}_on_{each}" for each in sources)]
    context = _describe_model(
        session, graph, sidecar.profiles if sidecar else data_profiles.engine_profiles(session)
    ) | {
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
        "ensembles": ensembles,
        **LIMITS,
    }
    with files.atomic_folder(out, replace=False) as temporary:
        models = temporary / "models"
        _write_tokenizer(models, session, context)
        for each, source in sources.items():
            encoder = models / f"{name}_{each}"
            _write_config(encoder, "encoder.pbtxt", context | {"backend": each})
            (encoder / "1").mkdir()
            shutil.copyfile(source, encoder / "1" / ("model.plan" if source is engine else "model.onnx"))
            _write_ensemble(models, f"{name}_on_{each}", context | {"backend": each})
        _write_ensemble(models, name, context)
        if plan == "script" and for_tensorrt:
            _write_plan_script(temporary / "tensorrt", context | {"backend": "tensorrt"}, for_tensorrt)
        _write_deployment(temporary, context)
    return TritonExport(name, backend, ensembles, plan, context["lengths"], context["max_batch"])


def _find_plan(folder: Path, graph: Path) -> tuple[Path | None, Sidecar | None]:
    built = (
        outcomes.read_built(folder)
        if (folder / outcomes.BUILD).is_file()
        else outcomes.Skipped(skipped="not built")
    )
    if isinstance(built, outcomes.Skipped):
        return None, None
    engine = outcomes.engine_file(folder, built)
    sidecar = read_sidecar(engine)
    if built.backend != "tensorrt":
        return None, sidecar  # TensorRT-RTX's engines are none of TensorRT's
    hashes = [files.sha256(path) if path.is_file() else "" for path in (engine, graph)]
    if hashes != [sidecar.engine_sha256, sidecar.onnx_sha256]:  # it need not run on this machine
        raise UserError(
            f"{engine} is not the engine that was built from {graph.name}; `qdqbench build {folder}` makes it"
        )
    return engine, sidecar


def _describe_model(session: Session, graph: Path, profiles: Sequence[Profile]) -> dict[str, Any]:
    task, kind = session.config.task, session.config.task.kind
    read = onnx.load(graph, load_external_data=False).graph
    longest = min(session.recipe.export.max_length, max(profile.max[1] for profile in profiles))
    sizes = dict[int, int]()  # most rows of each length that texts are padded to
    for wanted in range(LENGTH_STEP, longest + LENGTH_STEP, LENGTH_STEP):
        length = max(min(wanted, longest), min(profile.min[1] for profile in profiles))
        if rows := _most_rows(profiles, length):
            sizes[length] = rows
    if not sizes:
        raise UserError(
            "no profile of the engine takes one row, and Triton pads no batches; set the smallest "
            "batch of engine.shapes to 1 and build again"
        )
    lengths, max_batch = [*sizes], min(sizes.values())
    # shapes to run before the first request: a row of each length, near each opt, the largest
    warm = [(1, length) for length in lengths]
    for profile in profiles:
        nearest = min(lengths, key=lambda length: abs(length - profile.opt[1]))
        warm.append((min(profile.opt[0], max_batch), nearest))
    warm.append((max_batch, lengths[-1]))
    texts = describe_texts(kind, len(task.text_columns), lengths[-1])
    # Triton counts lines; it knows no class of a token
    labels = [re.sub(r"\s+", " ", clean(name)) for name in read_labels(session) if kind is not TOKENS]
    outputs = [_tensor(value) for value in read.output]
    extras = [Tensor(name, "TYPE_INT64", dims) for name, dims in EXTRAS.get(kind.name, {}).items()]
    return {
        "tokens": [_tensor(value) for value in read.input],
        "outputs": outputs,
        "texts": ["TEXT", "TEXT_PAIR"][: len(texts["texts"])],  # inputs of the tokenizer
        "extras": extras,
        "names": [each.name for each in (*outputs, *extras)],
        "labels": labels,
        "labelled": bool(labels),
        "several": kind is MULTI_LABEL,
        "words": texts["words"],
        "truncation": texts["truncation"],
        "pad_id": session.pad_id,
        "prompt": json.dumps(next(iter(task.prompts), ""), ensure_ascii=False),
        "profiles": [*profiles],
        "profile_numbers": [f'"{number}"' for number, _ in enumerate(profiles)],
        "lengths": lengths,
        "max_batch": max_batch,
        "preferred": sorted({min(profile.opt[0], max_batch) for profile in profiles} - {1}),
        "warm": [*dict.fromkeys(warm)],
    }


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
    return Tensor(value.name, TYPES[value.type.tensor_type.elem_type], dims)


def _write_tokenizer(models: Path, session: Session, context: dict[str, Any]) -> None:
    folder = models / f"{context['name']}_tokenizer"
    files.write_text(folder / "config.pbtxt", _render("tokenizer.pbtxt", context))
    model = Path(__file__).with_name("tokenizer_model.py").read_bytes()
    for name, content in ({"model.py": model} | standalone_modules()).items():
        files.write_bytes(folder / "1" / name, content)
    tokenizer: Any = session.tokenizer
    files.write_text(folder / "1" / "tokenizer.json", tokenizer.backend_tokenizer.to_str())


def _write_config(folder: Path, template: str, context: dict[str, Any]) -> None:
    files.write_text(folder / "config.pbtxt", _render(template, context))
    if context["labels"]:
        files.write_text(folder / "labels.txt", "\n".join(context["labels"]) + "\n")
    if template == "encoder.pbtxt":
        for length in sorted({length for _, length in context["warm"]}):
            files.write_bytes(folder / "warmup" / f"ones_{length}", np.ones(length, dtype="<i8").tobytes())


def _write_ensemble(models: Path, ensemble: str, context: dict[str, Any]) -> None:
    _write_config(models / ensemble, "ensemble.pbtxt", context | {"ensemble": ensemble})
    (models / ensemble / "1").mkdir()  # Triton wants a version of every model
    (models / ensemble / "1" / ".keep").touch()  # which copies and images would else leave out


def _write_plan_script(folder: Path, context: dict[str, Any], graph: Path) -> None:
    """Write what builds the plan elsewhere, and the configurations that then replace those of a CPU."""
    name, inputs = context["name"], {each.name: (-1, -1) for each in context["tokens"]}
    options = build_options("model.onnx", "model", inputs, context["profiles"])
    folder.mkdir()
    shutil.copyfile(graph, folder / "model.onnx")
    script = folder / "build_plan.sh"
    files.write_text(script, _render("build_plan.sh", context | {"trtexec": options}))
    script.chmod(0o755)
    _write_config(folder / "models" / f"{name}_tensorrt", "encoder.pbtxt", context)
    for ensemble in (name, f"{name}_on_tensorrt"):
        _write_ensemble(folder / "models", ensemble, context)


def _write_deployment(folder: Path, context: dict[str, Any]) -> None:
    manifests = ["deployment", "service", "hpa", "prometheus-adapter", "keda"]
    names = ["Dockerfile", "compose.yaml", "prometheus.yml", "README.md"]
    if context["plan"] != "none":
        names.append("compose.gpu.yaml")
        manifests.append("gpu-patch")
    for name in (*names, *(f"kubernetes/{manifest}.yaml" for manifest in manifests)):
        files.write_text(folder / name, _render(Path(name).name, context))
    for protocol, port, title in (("http", 8000, "HTTP"), ("grpc", 8001, "gRPC")):
        client = context | {"protocol": protocol, "port": port, "title": title}
        files.write_text(folder / f"client_{protocol}.py", _render("client.py", client))


def _render(template: str, context: dict[str, Any]) -> str:
    return render(template, context, TEMPLATES, trim=False)
