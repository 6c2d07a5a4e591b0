"""The commands `build` and `verify`: an engine, its proof, and whether its outputs are right."""

from qdqbench.quantize.cli import progress
from qdqbench.quantize.cli.answers import answer
from qdqbench.quantize.cli.run import stage_command
from qdqbench.quantize.cli.terminal import Json, RunFolder

verify = stage_command("verify", "Verify what the engine computes, where it runs.")


def build(folder: RunFolder, json: Json = False) -> None:
    """Build the engine, prove its INT8 layers, verify its outputs where it runs."""
    from qdqbench.eval.api.runs import build_made

    with progress.stages() as shown:
        found = build_made(folder, shown)
    answer(found, folder, json=json)
