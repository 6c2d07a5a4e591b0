"""Write a model repository of NVIDIA Triton from a deployed folder, and the files that start it."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqbench.quantize.deployment.write import render
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError

TRITON = "26.05"  # the release that files name; TRITON=YY.MM takes another
TEMPLATES = Path(__file__).parent / "templates"
# of a deployed folder, that a model needs
NEEDED = re.compile(
    r"(standalone|cuda_engine)/\w+\.py|model\.(gpu\.)?onnx|model\.json|tokenizer\.json|\w+\.engine(\.sha256)?|build_.*"
)
LIMITS = {
    "timeout_us": 10_000_000,  # of the queue, as the next
    "queue": 512,
    "target_us": 20_000,  # time in the queue that replicas are added at
}
MANIFESTS = ("deployment", "service", "hpa", "prometheus-adapter", "gpu-patch")


@dataclass(frozen=True)
class TritonExport:
    name: str  # of the model that clients ask
    runtime: str
    runtimes: list[str]
    max_batch: int


def export_triton(deployed: Path, out: Path, name: str | None = None) -> TritonExport:
    """Write a deployed folder as a model repository in a new or empty folder.

    `name` is the model's, of letters, digits and _; None: the run's folder. A `UserError` where it cannot be.
    """
    files.remove_abandoned(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is a file or holds files; give an empty or new folder")
    if name is None:
        name = re.sub(r"\W+", "_", deployed.resolve().parent.name, flags=re.ASCII).strip("_") or "model"
    elif not re.fullmatch(r"\w{1,100}", name, re.ASCII):
        raise UserError(f"--name {name!r} has other signs than letters, digits and _; give another")
    told = json.loads((deployed / "model.json").read_text(encoding="utf-8"))
    runtimes: list[str] = told["runtimes"]
    embeds = told["kind"].startswith("embedding")
    listed = (deployed / "requirements.txt").read_text(encoding="utf-8").split("\n")
    context: dict[str, Any] = {
        "name": name,
        "slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50] or "model",
        "recipe": told["recipe"],
        "runtime": runtimes[0],
        "runtimes": runtimes,
        "gpu": runtimes[0] not in ("onnxruntime", "openvino"),
        "texts": ["TEXT", "TEXT_PAIR"][: len(told["texts"])],
        "asked": told["texts"],
        "output": "sentence_embedding" if embeds else "answer",
        "embeds": embeds,
        "max_batch": 8 * told["batch"],
        "triton": TRITON,
        # the image has the NumPy that its Python backend was built for
        "requirements": [line for line in listed if not line.startswith(("#", "numpy=="))],
        **LIMITS,
    }
    with files.atomic_folder(out, replace=False) as temporary:
        model = temporary / "models" / name
        for path in [path.relative_to(deployed) for path in sorted(deployed.rglob("*")) if path.is_file()]:
            if path.name == files.SUMS or NEEDED.fullmatch(path.as_posix()):
                (model / "1" / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(deployed / path, model / "1" / path)
        files.write_bytes(model / "1" / "model.py", Path(__file__).with_name("model.py").read_bytes())
        files.write_text(model / "config.pbtxt", _render("config.pbtxt", context))
        names = ["Dockerfile", "compose.yaml", "compose.gpu.yaml", "prometheus.yml", "README.md"]
        for each in (*names, *(f"kubernetes/{manifest}.yaml" for manifest in MANIFESTS)):
            files.write_text(temporary / each, _render(Path(each).name, context))
        for protocol, port, title in (("http", 8000, "HTTP"), ("grpc", 8001, "gRPC")):
            client = context | {"protocol": protocol, "port": port, "title": title}
            files.write_text(temporary / f"client_{protocol}.py", _render("client.py", client))
    return TritonExport(name, runtimes[0], runtimes, context["max_batch"])


def _render(template: str, context: dict[str, Any]) -> str:
    return render(template, context, TEMPLATES, trim=False)
