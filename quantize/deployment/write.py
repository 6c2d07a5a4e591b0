"""Write a finished run as a folder that needs nothing of qdqbench."""

import functools
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from qdqbench.quantize.deployment import folder as place
from qdqbench.quantize.deployment.asked import Asked, read_asked, stride
from qdqbench.quantize.deployment.ways import BUILD_SCRIPT, Way, find_ways, installed
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.trtexec.command import build_options
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.models.identity import model_commit
from qdqbench.quantize.models.load import load_config
from qdqbench.quantize.models.pooling import find_model_file
from qdqbench.quantize.pipeline.artifacts import (
    backend_of,
    engine_profiles,
    graph_for_tensorrt,
    graph_path,
    recipe_profiles,
)
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import dump_recipe
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import read_bounded
from qdqbench.quantize.utils.results import Results
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    from jinja2 import Environment

MOST = 1 << 20  # bytes of a model card
# a plain value of a line: as YAML, a card from anywhere could expand aliases or hold what its reader fails at
_LINE = re.compile(
    r"^(license|license_name):[ \t]+([\"']?)(\w[^\n\"'#]{0,200})\2[ \t]*(?:#.*)?$", re.MULTILINE
)


def find_license(name: str, revision: str | None) -> str | None:
    """Return the license in the head of a model's card (README.md); None where there is none, or no card."""
    try:
        with quiet("transformers"):
            card = find_model_file(name, "README.md", model_commit(name, revision))
        text = read_bounded(Path(card), MOST, "a model card", "another") if card else ""
    except Exception:
        return None
    head, end, _ = text.removeprefix("---\n").partition("\n---")
    values = {key: value for key, _, value in _LINE.findall(head)} if end and text.startswith("---\n") else {}
    found = values.get("license_name", values.get("license", ""))
    return " ".join(found.split())[:100] or None


DEPLOY = "deploy"  # folder of a run
MODEL, GPU_MODEL = "model.onnx", "model.gpu.onnx"
TOLD = "model.json"
MOST_ROWS = 32  # of a batch, where the profiles take as many
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Said:
    """The verdict of the run in words."""

    title: str
    sentence: str
    failed: str  # why it is not for use; empty: nothing fails
    lines: Sequence[str]  # that failed, or is open


def write_deploy(session: Session, results: Results, said: Said, out: Path | None = None) -> list[Way]:
    """Make the folder of a finished run say what the run now is; the backends that its scripts ask.

    Args:
        results: without characters that garble a page.
        out: another folder, new or of an earlier call, for copies; None: `deploy` in the run, of hard links.

    Raises:
        UserError: the graph is not there, or the folder cannot be written or holds what somebody else wrote.
    """
    graph = graph_path(session)
    if not graph.is_file():
        raise UserError(f"{session.folder} has no {graph.name}; run `qdqbench report {session.folder}` first")
    for_gpu = graph_for_tensorrt(session, graph)
    ways = find_ways(session.folder, results, backend_of(session.recipe), for_gpu)
    asked = read_asked(session)
    told = _told(session, graph, asked, ways) | {"failed": said.failed}
    beside = for_gpu is not None and for_gpu != graph
    profiles = _gpu_profiles(session, ways) if for_gpu else []
    context: dict[str, Any] = {
        **vars(asked),
        "asked": asked,
        "example": asked.example,
        "sample": _sample(asked),
        "gpu": for_gpu is not None,
        "gpu_model": GPU_MODEL if beside else MODEL,
        "told": told,
        "profiles": profiles,
        "said": said,
        "r": results,
        "ways": ways,
        "model": _base_name(session.model_name) if session.config.model else "embedded default",
        "data": _base_name(str(results.data.get("source", ""))),
        "task": session.config.task.name,
        "recipe": session.recipe.name,
        "license": find_license(session.model_name, session.config.revision),
        "metrics": list(next(iter(results.stages.values())).metrics),
        "versions": {
            name: installed(name) for name in ("qdqbench", "torch", "transformers", "nvidia-modelopt", "onnx")
        },
        "numpy": installed("numpy"),
        "tokenizers": installed("tokenizers"),
    }
    content: dict[str, bytes | Path] = {MODEL: graph, **_tokenizer(session)}
    if for_gpu is not None:
        content |= {GPU_MODEL: for_gpu} if beside else {}
        shapes = dict.fromkeys(told["inputs"], (-1, -1))
        options = build_options(context["gpu_model"], "built", shapes, profiles)
        content[BUILD_SCRIPT] = _render("build_tensorrt.sh", context | {"trtexec": options})
        context["trtexec"] = options
    for way in ways:
        if way.engine is not None:
            content[f"{way.backend}.engine"] = way.engine
        script = "run_tensorrt.py" if way.backend.startswith("tensorrt") else way.script
        content[way.script] = _render(script, context | {"backend": way.backend, "title": way.title})
    content |= {
        "model.py": _render("model.py", context),
        TOLD: (json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode(),
        "config.json": load_config(session.model_name, session.config.revision).to_json_string().encode(),
        "recipe.yaml": dump_recipe(session.recipe).encode(),
        "requirements.txt": _render("requirements.txt", context),
        "README.md": _render("README.md", context | {"files": sorted(content)}),
    }
    place.place(out or session.folder / DEPLOY, content, link=out is None)
    return ways


def _told(session: Session, graph: Path, asked: Asked, ways: Sequence[Way]) -> dict[str, Any]:
    """What the scripts read: `model.json`."""
    read = read_model(graph).graph
    limits = [way.sidecar.profiles for way in ways if way.sidecar is not None] or [engine_profiles(session)]
    longest = min(max(each.max[1] for each in profiles) for profiles in limits)
    length = min(session.recipe.export.max_length, longest)
    rows = min(max(p.max[0] for p in profiles if p.max[1] >= length) for profiles in limits)
    computes = [way.sidecar.compute for way in ways if way.sidecar is not None and way.backend == "openvino"]
    optimized = any(way.ran and way.backend == "onnxruntime" for way in ways)
    return {
        "task": session.config.task.name,
        "kind": session.config.task.kind.name,
        "inputs": [value.name for value in read.input],
        "outputs": {value.name: _type(value) for value in read.output},
        "labels": asked.labels,
        "pooling": asked.pooling,
        "max_length": length,
        "stride": stride(asked, length),
        "truncation": asked.truncation,
        "pad_id": session.pad_id,
        "batch": min(rows, MOST_ROWS),
        "script": ways[0].script,  # the nearest to what the run showed
        "example": asked.example,
        "ran": any(way.ran for way in ways),  # as the engine of the run
        "onnxruntime": "ORT_ENABLE_ALL" if optimized else "ORT_DISABLE_ALL",
        "openvino": {"INFERENCE_PRECISION_HINT": "bf16" if "bf16" in computes else "f32", "NUM_STREAMS": 1},
    }


def _type(value: Any) -> str:
    return str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))


def _gpu_profiles(session: Session, ways: Sequence[Way]) -> list[Profile]:
    """Shapes of an engine that is built elsewhere: the recipe's, else those that the run has."""
    built = [way.sidecar for way in ways if way.sidecar is not None and way.sidecar.compute_capability]
    return recipe_profiles(session.recipe) or (built[0].profiles if built else engine_profiles(session))


def _sample(asked: Asked) -> str:
    if asked.words:
        return "a list of words"
    return f"({', '.join(asked.texts)})" if len(asked.texts) == 2 else "a text"


def _tokenizer(session: Session) -> dict[str, bytes]:
    """Files of the tokenizer as the run used it."""
    tokenizer: Any = session.tokenizer
    tokenizer.backend_tokenizer.no_truncation()  # what the last call asked for is no part of it
    tokenizer.backend_tokenizer.no_padding()
    with tempfile.TemporaryDirectory(prefix="qdqbench-tokenizer-") as made:
        tokenizer.save_pretrained(made)
        found = sorted(path for path in Path(made).rglob("*") if path.is_file())
        return {f"tokenizer/{path.relative_to(made).as_posix()}": path.read_bytes() for path in found}


def _base_name(name: str) -> str:
    """A hub id, or the last part of a path: paths of this machine say nothing elsewhere."""
    return Path(name).resolve().name if Path(name).exists() else name


def _render(template: str, context: dict[str, Any]) -> bytes:
    return _templates().get_template(f"{template}.j2").render(context).encode()


@functools.cache
def _templates() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(  # noqa: S701  (no HTML)
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    made.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return made
