"""Write a finished run as a folder that needs nothing of qdqbench, and upload it to the Hub."""

import glob
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import onnx

from qdqbench.quantize import standalone
from qdqbench.quantize.deployment import hub
from qdqbench.quantize.deployment.hub import MeasuredRun
from qdqbench.quantize.engine.cpu_runtimes import write_openvino_ir
from qdqbench.quantize.engine.cuda.compile import get_version
from qdqbench.quantize.engine.cuda.runtime import load_engine
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.engine.sidecar import Sidecar, read_own_sidecar
from qdqbench.quantize.engine.trtexec import build_options
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.models import identity
from qdqbench.quantize.models.load import load_config
from qdqbench.quantize.pipeline import data_profiles, graphs, outcomes
from qdqbench.quantize.pipeline.pipeline import require_recorded
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import dump_recipe
from qdqbench.quantize.report import formats
from qdqbench.quantize.report.document import Line
from qdqbench.quantize.report.render import prose
from qdqbench.quantize.tasks.data.encode import OVERLAP
from qdqbench.quantize.tasks.data.files import find_root_cause
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION
from qdqbench.quantize.tasks.kinds.kind import TaskKind
from qdqbench.quantize.tasks.kinds.multilabel import MULTI_LABEL
from qdqbench.quantize.tasks.kinds.questions import QUESTIONS
from qdqbench.quantize.tasks.kinds.reranking import RERANKING
from qdqbench.quantize.tasks.kinds.tokens import TOKENS
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import QdqError, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.system.cpu import INT8_DOT

DEPLOY = "deploy"  # folder of a run
MODEL, GPU_MODEL, TOLD = "model.onnx", "model.gpu.onnx", "model.json"
CUDA_MODULES = "cuda_engine"  # folder of the modules that run an engine of backend cuda
_OURS = re.compile(r"^from (qdqbench\.[\w.]+) import", re.MULTILINE)
_IMPORT = re.compile(r"^from qdqbench\.[\w.]+\.(\w+) import", re.MULTILINE)
BUILD_SCRIPT = "build_tensorrt.sh"
CACHE = "__pycache__"  # which Python writes next to scripts that ran
TEMPLATES = Path(__file__).parent / "templates"
MOST_ROWS = 32  # of a batch, where the profiles take as many
# title, and the distributions that a script imports as well as numpy and tokenizers
BACKENDS: dict[BackendName, tuple[str, tuple[str, ...]]] = {
    "onnxruntime": ("ONNX Runtime", ("onnxruntime",)),
    "openvino": ("OpenVINO", ("openvino",)),
    "tensorrt": ("TensorRT", ("tensorrt", "torch")),
    "tensorrt_rtx": ("TensorRT-RTX", ("tensorrt-rtx-cu13", "torch")),
    "cuda": ("CUDA kernels", ("torch",)),
}
TEXTS = "a text", "its second text"
ASKED = {  # what the texts are, where they are not just texts, by the name of the kind
    RERANKING.name: ("a query", "a passage"),
    TOKENS.name: ("words with spaces between them",),
    QUESTIONS.name: ("a question", "its context"),
}
Content = Mapping[str, bytes | Path]  # by its name in the folder: what a file holds, or where that lies


def describe_texts(kind: TaskKind, columns: int, max_length: int) -> dict[str, Any]:
    """Return what `standalone` has to know of the texts of a task."""
    return {
        "kind": kind.name,
        "texts": ASKED.get(kind.name, TEXTS)[: 1 if kind.texts_apart else columns],
        "words": kind.split_words,  # texts are words between spaces
        "over_tokens": kind.over_tokens,  # outputs are of tokens
        "max_length": max_length,
        "truncation": kind.truncation,
        "stride": max_length // OVERLAP if kind.windows else 0,  # tokens that windows share
    }


def describe_task(session: Session, max_length: int) -> dict[str, Any]:
    """Return what `standalone` has to know of a run's task and tokenizer; `model.json` has it too."""
    task, tokenizer = session.config.task, session.tokenizer
    return {
        **describe_texts(task.kind, len(task.text_columns), max_length),
        "side": tokenizer.truncation_side,  # where a text is cut off
        "labels": read_labels(session),
        "prompt": next(iter(task.prompts), ""),
        "pad_id": session.pad_id,
    }


def read_labels(session: Session) -> list[str]:
    """Return the names of the answers' columns; empty where they are no classes."""
    classified = session.config.task.kind in (CLASSIFICATION, MULTI_LABEL, TOKENS)
    return [*session.class_names] if classified else []


def _read_pooling(session: Session) -> identity.Pooling | None:
    if not session.config.task.kind.embeds:
        return None
    name, revision = session.model_name, session.config.revision
    folder = identity.read_sentence_folder(name, identity.model_commit(name, revision))
    return identity.choose_pooling(name, folder, load_config(name, revision), session.config.pooling)


@dataclass(frozen=True)
class Runtime:
    backend: BackendName
    shown: str  # by the run
    ran: bool = False  # here, as the run's engine
    engine: Path | None = None  # that was built, and what it is for
    sidecar: Sidecar | None = None

    @property
    def title(self) -> str:
        return BACKENDS[self.backend][0]

    @property
    def script(self) -> str:
        return f"run_{self.backend}.py"

    @property
    def requirements(self) -> list[str]:
        """Packages of its script, with the versions that the run had; without one where it had none."""
        library, *others = BACKENDS[self.backend][1]
        versions = {name: installed(name) for name in (library, *others)}
        if self.sidecar is not None and library != "torch":
            # OpenVINO's has a commit behind it, which no index knows
            versions[library] = self.sidecar.version.partition("-")[0]
        return [f"{name}=={version}" if version else name for name, version in versions.items()]


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, without the part that no index has (`+cpu`)."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def find_runtimes(
    folder: Path, results: MeasuredRun, own: BackendName, gpu_graph: Path | None
) -> list[Runtime]:
    """Return the backends that take a run's graphs; first that of its engine, where it can be asked here."""
    shown: dict[BackendName, str] = {
        "onnxruntime": _describe_onnxruntime(outcomes.read_optimized(folder), results.gate.max_drop),
        "openvino": "not tried in the run",
    }
    if gpu_graph is not None:
        shown["tensorrt"] = f"not tried in the run; `sh {BUILD_SCRIPT}` builds its engine first"
    runtimes = {backend: Runtime(backend, text) for backend, text in shown.items()}
    for built, home in ((results.gpu_engine, folder / graphs.GPU), (results.engine, folder)):
        if built is not None:
            runtime = _describe_engine(home, built, results)
            runtimes[runtime.backend] = runtime
    return sorted(
        runtimes.values(),
        key=lambda runtime: (not runtime.ran, runtime.backend not in CPU_BACKENDS, runtime.backend != own),
    )


def _describe_onnxruntime(optimized: outcomes.OptimizedRun | None, max_drop: float) -> str:
    exported = "the graph as exported, as the run evaluated it (stage onnxruntime): slow. "
    if optimized is None:
        level = '`level = "ORT_ENABLE_ALL"` in `standalone/runtimes.py`'
        return f"{exported}{level} is faster, and its answers may differ a little"
    if lost := optimized.describe_loss(max_drop):
        return f"{exported}Not with ONNX Runtime's optimizations: {lost}"
    scores = ", ".join(f"{name} {value:.4f}" for name, value in optimized.metrics.items())
    told = (
        f"the graph with ONNX Runtime's optimizations, as the run evaluated it: {scores}; INT8 as in the run"
    )
    return f"{told}. On a CPU without INT8 dot products (VNNI) the script is slower and stays exact"


def _describe_engine(home: Path, built: EngineResult, results: MeasuredRun) -> Runtime:
    engine, stage = outcomes.engine_file(home, built), results.stages.get("engine")
    sidecar = read_own_sidecar(engine)
    ran = built is results.engine and stage is not None and stage.status == "done"
    targets = ", ".join(built.compute_capability)
    if ran:
        compiled = "compiled from `model.onnx` as the engine of the run was"
        gpu = f" ({sidecar.gpu})" if sidecar.gpu else ""
        target = f", for compute capability {targets}{gpu}" if targets else ""
        checked = "verified" if results.verification and results.verification.passed else "NOT verified"
        shown = (
            f"{compiled if built.on_cpu else 'the engine of the run'}{target}; that was proven, {checked} "
        )
        shown += "and evaluated (stage engine)"
    else:
        shown = f"built for compute capability {targets} with {sidecar.version}, INT8 read from its "
        shown += "layer table; NEVER RUN"
    return Runtime(cast("BackendName", built.backend), shown, ran, engine, sidecar)


@dataclass(frozen=True)
class RunVerdict:
    title: str
    judged: Sequence[Line]
    failed: str  # why it is not for use; empty: nothing fails
    lines: Sequence[str]  # that failed, or is open


def write_deploy(
    session: Session,
    results: MeasuredRun,
    verdict: RunVerdict,
    out: Path | None = None,
    *,
    fp32: bool = False,
) -> None:
    """Make the folder of a finished run say what the run now is; a `UserError` where it cannot be written.

    `results` have no characters that garble a page. Another folder `out`, new or of an earlier call, gets
    copies; `deploy` in the run gets hard links. With `fp32` it has the FP32 twin too.
    """
    with tempfile.TemporaryDirectory(prefix="qdqbench-deploy-") as made:
        content = _collect(session, results, verdict, Path(made), fp32)
        place(out or session.folder / DEPLOY, content, link=out is None)


def _collect(session: Session, results: MeasuredRun, verdict: RunVerdict, made: Path, fp32: bool) -> Content:
    """Return the files of the folder; graphs that the run does not have are written into `made`."""
    graph = graphs.graph_path(session)
    if not graph.is_file():
        raise UserError(f"{session.folder} has no {graph.name}; run `qdqbench report {session.folder}` first")
    require_recorded(session, graph)
    gpu_graph = graphs.graph_for_tensorrt(session, graph)
    runtimes = find_runtimes(session.folder, results, session.target.backend, gpu_graph)
    task = session.config.task
    model_json = _describe_model(session, graph, runtimes) | {"failed": verdict.failed}
    pooling = _read_pooling(session)
    config = hub.describe_config(session, results, model_json["labels"])
    name = _base_name(session.model_name) if session.config.model else "built-in BERT"

    def deployed(source: Path) -> Path:
        """Return the graph that is deployed for one of the run."""
        if pooling is None:
            return source
        recipe, width = session.recipe.name, config["hidden_size"]
        return hub.add_hidden_state(source, made / source.name, recipe, width)

    model = deployed(graph)
    content: dict[str, bytes | Path] = {
        MODEL: model,
        hub.INT8 if session.recipe.quantizes else hub.PLAIN: model,
        **hub.save_tokenizer(session, model_json["max_length"]),
        **(hub.describe_sentences(session, pooling) if pooling else {}),
    }
    if fp32:
        content[hub.PLAIN] = deployed(session.folder / graphs.FP32)
    no_ir = "" if find_spec("openvino") else "it was not installed"
    if not no_ir:
        try:
            write_openvino_ir(model, made / "openvino.xml")
            content |= {hub.IR: made / "openvino.xml", f"{hub.IR[:-4]}.bin": made / "openvino.bin"}
        except UserError as error:
            no_ir = str(error)
    context: dict[str, Any] = {
        **model_json,
        "prompts": [*dict.fromkeys(task.prompts)],
        "gpu": gpu_graph is not None,
        "gpu_model": MODEL if gpu_graph in (None, model) else GPU_MODEL,
        "hub": hub,
        "optimum": task.kind.model_class.replace("Auto", "ORT"),
        "fp32": fp32,
        "no_ir": no_ir,
        "quantized": session.recipe.quantizes,
        "model_json": model_json,
        "verdict": verdict,
        "r": results,
        "runtimes": runtimes,
        "model": name,
        "data": _base_name(str(results.data.get("source", ""))),
        "license": hub.find_license(session.model_name, session.config.revision),
        "metrics": list(next(iter(results.stages.values())).metrics),
        "versions": {
            name: installed(name) for name in ("qdqbench", "torch", "transformers", "nvidia-modelopt", "onnx")
        },
        "numpy": installed("numpy"),
        "tokenizers": installed("tokenizers"),
    }
    if gpu_graph is not None:
        content[context["gpu_model"]] = gpu_graph
        shapes = dict.fromkeys(model_json["inputs"], (-1, -1))
        # of an engine that is built elsewhere: the recipe's, else those that the run has
        built = [r.sidecar.profiles for r in runtimes if r.sidecar and r.sidecar.compute_capability]
        profiles = data_profiles.recipe_profiles(session.recipe) or next(iter(built), [])
        profiles = profiles or data_profiles.engine_profiles(session)
        context["trtexec"] = build_options(context["gpu_model"], "built", shapes, profiles)
        content[BUILD_SCRIPT] = render("build_tensorrt.sh", context).encode()
    for runtime in runtimes:
        if runtime.engine is not None:
            content[f"{runtime.backend}.engine"] = runtime.engine
        if runtime.backend == "cuda":
            content |= collect_modules(load_engine.__module__)
        variables = {"backend": runtime.backend, "title": runtime.title, "script": runtime.script}
        content[runtime.script] = render("run.py", context | variables).encode()
    title = f"{name}-{session.recipe.name}"
    context["card"] = hub.describe_card(session, results, title=title, openvino=not no_ir)
    rendered = {
        name: render(name, context).encode() for name in ("serve.py", "requirements.txt", "README.md")
    }
    written = {TOLD: hub.encode(model_json), "config.json": hub.encode(config)}
    recipe = {"recipe.yaml": dump_recipe(session.recipe).encode()}
    return {**content, **standalone_modules(), **rendered, **written, **recipe}


def standalone_modules() -> dict[str, bytes]:
    """Return the modules that answer texts without qdqbench, as files of one package.

    They are no paths: a link to the installed package would take changes of a deployed script into it.
    """
    folder = Path(standalone.__file__).parent
    found = (path.relative_to(folder.parent).as_posix() for path in sorted(folder.rglob("*.py")))
    return {name: (folder.parent / name).read_bytes() for name in found}


def collect_modules(name: str) -> dict[str, bytes]:
    """Return a module and all of ours that it imports, as files of one package."""
    found, waiting = dict[str, bytes](), [name]
    for module in waiting:
        path = f"{CUDA_MODULES}/{module.rpartition('.')[2]}.py"
        if path in found:
            raise QdqError(f"two modules would be {path} of the deployed folder; rename {module}")
        source = Path(import_module(module).__file__ or "").read_text(encoding="utf-8")
        waiting += [each for each in dict.fromkeys(_OURS.findall(source)) if each not in waiting]
        found[path] = _IMPORT.sub(r"from .\1 import", source).encode()
    return found


def _describe_model(session: Session, graph: Path, runtimes: Sequence[Runtime]) -> dict[str, Any]:
    read, task, pooling = read_model(graph).graph, session.config.task, _read_pooling(session)
    sidecars = [runtime.sidecar for runtime in runtimes if runtime.sidecar is not None]
    limits = [sidecar.profiles for sidecar in sidecars] or [data_profiles.engine_profiles(session)]
    longest = min(max(each.max[1] for each in profiles) for profiles in limits)
    length = min(session.recipe.export.max_length, longest)
    rows = min(max(p.max[0] for p in profiles if p.max[1] >= length) for profiles in limits)
    bf16 = any(sidecar.backend == "openvino" and sidecar.compute == "bf16" for sidecar in sidecars)
    evaluated = outcomes.read_optimized(session.folder)
    optimized = evaluated is not None and not evaluated.describe_loss(session.recipe.gate.max_drop)
    optimized |= any(runtime.ran and runtime.backend == "onnxruntime" for runtime in runtimes)
    told = describe_task(session, length)
    return {
        "task": task.name,
        **told,
        "inputs": [value.name for value in read.input],
        "outputs": {
            value.name: str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            for value in read.output
        },
        "pooling": pooling.model_dump(mode="json") if pooling else None,
        "batch": min(rows, MOST_ROWS),
        "name": f"{_base_name(session.model_name)}-{session.recipe.name}",
        "recipe": session.recipe.name,
        "runtimes": [runtime.backend for runtime in runtimes],  # first the nearest to what the run showed
        "script": runtimes[0].script,
        "example": " ".join(f'"{text}"' for text in told["texts"]),  # arguments of a command line
        "ran": any(runtime.ran for runtime in runtimes),  # as the engine of the run
        "onnxruntime": "ORT_ENABLE_ALL" if optimized else "ORT_DISABLE_ALL",
        "int8_dot": INT8_DOT,
        "shared_layers": session.plan.family.shared_layers,
        "cuda": get_version(),  # of the kernels of backend cuda
        "openvino": {"INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32"},
        "streams": max((each.streams for each in sidecars if each.backend == "openvino"), default=1),
    }


def _base_name(name: str) -> str:  # a path of this machine says nothing elsewhere
    return Path(name).resolve().name if Path(name).exists() else name


def render(template: str, context: dict[str, Any], folder: Path = TEMPLATES, *, trim: bool = True) -> str:
    text: str = _templates(folder, trim).get_template(f"{template}.j2").render(context)
    return text


@cache
def _templates(folder: Path, trim: bool) -> Any:
    """Return the templates of a folder, each of which is compiled once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701  (no HTML)
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=trim,
    )
    environment.filters["code"] = lambda text: formats.code(formats.clean(text))
    environment.filters["inline"] = lambda text: formats.inline(formats.clean(text))
    environment.filters["prose"] = prose
    environment.filters["cell"] = lambda text: " ".join(
        formats.clean(str(text)).replace("|", "\\|").splitlines()
    )
    return environment


def place(folder: Path, content: Content, *, link: bool) -> None:
    """Make a folder hold these files and their checksums, and nothing else: whole or absent.

    With `link` they are hard links, where the file system can. A `UserError` lists what was not written here.
    """
    sums = {name: _sum(source) for name, source in content.items()}
    files.remove_abandoned(folder)
    if folder.exists():
        if folder.is_dir() and _sums_of(folder, content, sums) == sums:
            return
        if folder.is_symlink() or not folder.is_dir():
            raise UserError(f"{folder} is a file or a link, and what is deployed goes there; move it away")
        if others := _list_foreign(folder):
            are, them = ("is", "it") if len(others) == 1 else ("are", "them")
            raise UserError(
                f"{folder} was left as it is: {name_list(others)} in it {are} not of qdqbench or changed "
                f"since; move {them} away, then `qdqbench deploy {folder.parent}`"
            )
    try:
        with files.atomic_folder(folder) as temporary:
            for name, source in content.items():
                _write(temporary / name, source, link)
            lines = (f"{sums[name]}  {name}\n" for name in sorted(sums))
            files.write_text(temporary / files.SUMS, "".join(lines))
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror}; make room, or choose another folder"
        ) from error


def remove(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not _list_foreign(folder):
        shutil.rmtree(folder, ignore_errors=True)


def read_sums(folder: Path) -> dict[str, str]:
    """Return the checksums of the files that were written here, by name; none where nothing was."""
    try:
        lines = (folder / files.SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _list_foreign(folder: Path) -> list[str]:
    listed = read_sums(folder)
    return sorted(name for name, digest in _sums_of(folder, {}, {}).items() if listed.get(name) != digest)


def _sums_of(folder: Path, content: Content, sums: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums of what is there; a link to the content with these sums is not read again."""
    found = {}
    for path in (path for path in folder.rglob("*") if path.is_file() or path.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if name != files.SUMS and not (path.parent.name == CACHE and path.suffix == ".pyc"):
            source = content.get(name)
            linked = isinstance(source, Path) and path.exists() and path.samefile(source)
            found[name] = sums[name] if linked else _sum(path)
    return found


def _sum(source: bytes | Path) -> str:
    """Return a checksum; empty of a file that cannot be read."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    try:
        return files.sha256(source)
    except OSError:
        return ""


def _write(path: Path, source: bytes | Path, link: bool) -> None:
    if isinstance(source, bytes):
        files.write_bytes(path, source)
        if path.suffix == ".sh":
            path.chmod(0o755)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(source, path)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(source, path)


def push_folder(folder: Path, repository: str, *, private: bool = False, create_pr: bool = False) -> str:
    """Upload a folder that `write_deploy` wrote, and return the URL of its commit or pull request.

    huggingface_hub finds the token and the Hub (HF_TOKEN or its login, HF_ENDPOINT). Without `create_pr` the
    repository is created if needed. UserError: the run failed, there is no token, or the Hub refuses.
    """
    from huggingface_hub import HfApi, get_token

    if failed := json.loads((folder / TOLD).read_text(encoding="utf-8"))["failed"]:
        raise UserError(f"{folder} is not for use, so it is not pushed: {failed}")
    if (token := get_token()) is None:
        raise UserError("no token for the Hub; `hf auth login` stores one, HF_TOKEN sets one")
    api = HfApi()
    try:
        if not create_pr:
            api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.repo_info(repository).private:
            raise UserError(f"{repository} is there and public; make it private, or drop --private")
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload INT8 graphs by qdqbench",
            create_pr=create_pr,
            allow_patterns=[glob.escape(name) for name in (*read_sums(folder), files.SUMS)],
        )
    except UserError:
        raise
    except Exception as error:  # of httpx, of huggingface_hub, OSError, ValueError
        reason = find_root_cause(error).replace(token, "TOKEN")
        raise UserError(f"cannot push to {repository}: {reason}") from error
    return str(done.pr_url or done.commit_url)
