"""A run as the server takes it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from qdqbench.quantize.deployment.opened import Answering, read_texts
from qdqbench.quantize.deployment.serve_options import ServeOptions
from qdqbench.quantize.standalone.server.settings import Served
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import LOOK
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.system.gpu import count_gpus

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
PAGES = Path(__file__).parent / "pages"


def open_served(folder: Path, options: ServeOptions) -> Served:
    """Open a run for serving; MissingDevice without an engine, `UserError` where it cannot be served here."""
    answering = Answering.of(folder, fp32=not options.no_fp32, texts=False)
    told, on_cpu = answering.told, answering.backend in CPU_BACKENDS
    if options.watch and (options.no_fp32 or told["kind"] != "classification"):
        raise UserError("--watch compares classes with those of the FP32 model; leave it or --no-fp32 out")
    fp32 = {} if options.no_fp32 else {"fp32": answering.open_fp32}
    return Served(
        name=folder.resolve().name,
        recipe=answering.recipe,
        made_with=answering.made_with,
        told=told,
        tokenizer=answering.tokenizer,
        models={"engine": answering.open_infer, **fp32},
        max_drop=answering.max_drop,
        gpus=0 if on_cpu else max(1, count_gpus()),
        texts=partial(read_texts, folder),
        about={"task": answering.task, "columns": [*answering.columns], "int8": answering.int8},
        pages=dict(_read_pages()),
    )


def _read_pages() -> Iterator[tuple[str, tuple[bytes, str]]]:
    for path in (*sorted(PAGES.iterdir()), LOOK):
        name = "" if path.stem == "index" else path.name
        yield f"/{name}", (path.read_bytes(), f"{TYPES[path.suffix]}; charset=utf-8")
