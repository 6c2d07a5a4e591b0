"""The command `recipes from-cache`. Everything heavy is imported inside."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdqbench.quantize.cli.terminal import Json, plain, show

if TYPE_CHECKING:
    from qdqbench.quantize.legacy.from_cache import FromCache


def from_cache(  # noqa: PLR0913, PLR0917  (a command's options)
    cache: Annotated[Path, typer.Argument(help="Calibration cache of TensorRT 5 to 10.", show_default=False)],
    model: Annotated[str, typer.Option(help="Folder or hub id; its configuration is read, no weights.")],
    onnx: Annotated[
        Path | None, typer.Option(help="The ONNX file that was calibrated; none: names of an export here.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Of a hub model: branch, tag or commit; none: its default branch.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Recipe file; none: NAME.yaml here.")] = None,
    json: Json = False,
) -> None:
    """Write a recipe whose amax are those of a calibration cache, where its tensors can be matched."""
    from qdqbench.quantize.core import files
    from qdqbench.quantize.core.errors import UserError
    from qdqbench.quantize.legacy.from_cache import recipe_from_cache

    if out is not None and out.exists():
        raise UserError(f"{out} is there already; give another --out")
    made = recipe_from_cache(cache, model, revision=revision, onnx_file=onnx)
    path = out or Path(f"{made.recipe}.yaml")
    if path.exists():
        raise UserError(f"{path} is there already; give another --out")
    files.write_text(path, made.text)
    told = f"wrote {path}; run it with `qdqbench run {path} --model {model} --task ...`"
    show(made, json, _lines, plain(told))


def _lines(made: "FromCache") -> Any:
    from rich.console import Group
    from rich.text import Text

    total = len(made.given) + len(made.calibrated)
    lines = [
        f"TensorRT {made.version}, {made.calibrator}: amax of {len(made.given)} of {total} INT8 linears, "
        f"matched with {made.graph}; {made.unused} tensors of the cache are not used"
    ]
    reasons: dict[str, list[str]] = {}
    for linear, why in made.calibrated.items():
        reasons.setdefault(why, []).append(linear)
    for why, linears in reasons.items():
        lines.append(f"calibrated from data, because {why}: {linears[0]}" + _more(linears))
    return Group(*(Text(plain(line).replace("\\[", "[")) for line in lines))


def _more(linears: list[str]) -> str:
    return f" and {len(linears) - 1} more" if len(linears) > 1 else ""
