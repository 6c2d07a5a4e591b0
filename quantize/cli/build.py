"""The commands `build` and `verify`: an engine, its proof, and whether its outputs are right."""

from typing import Annotated

import typer

from qdqbench.quantize.cli import progress
from qdqbench.quantize.cli.answers import answer
from qdqbench.quantize.cli.run import stage_command
from qdqbench.quantize.cli.terminal import Json, RunFolder, print_json

verify = stage_command("verify", "Judge what the engine computes, where it runs or trtexec ran it.")


def build(
    folder: RunFolder,
    print_trtexec: Annotated[
        bool,
        typer.Option(
            "--print-trtexec",
            help="Build nothing: print the commands for a machine with trtexec; its inputs are written.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Build the engine, prove its INT8 layers, verify its outputs where it runs."""
    if print_trtexec:
        _print_trtexec(folder, json)
        return
    from qdqbench.eval.api.runs import build_made

    with progress.stages() as shown:
        found = build_made(folder, shown)
    answer(found, folder, json=json)


def _print_trtexec(folder: RunFolder, json: bool) -> None:
    import sys

    from qdqbench.eval.api.trtexec import trtexec_script

    with progress.stages() as shown:
        script, new = trtexec_script(folder, shown)
    text = script.read_text(encoding="utf-8")
    if json:
        print_json({"script": str(script), "new": new, "text": text})
        return
    sys.stdout.write(text)
    sys.stderr.write(
        f"{'wrote' if new else 'kept'} {script}: run it where trtexec is, with {folder} there, bring "
        f"{script.parent} back, then `qdqbench report {folder}`\n"
    )
