"""The command `bench`; registered in cli.py. Everything heavy is imported inside."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from qdqbench.quantize.cli.options import Replace, grouped, note
from qdqbench.quantize.cli.progress import status
from qdqbench.quantize.cli.terminal import Json, command_line, say, show, show_json
from qdqbench.quantize.core.names import DEFAULT_RECIPE


@dataclass(frozen=True)
class Wanted:
    """What is measured, and how."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder, or a published size with random weights: bert-base, xlm-roberta-base..."
        ),
    ] = None
    pooling: Annotated[
        str | None, typer.Option(help="With --model: as an embedding model that pools by mean, cls or last.")
    ] = None
    normalize: Annotated[bool, typer.Option("--normalize", help="To length 1; with --pooling.")] = False
    recipe: Annotated[
        str | None, typer.Option(help=f"With --model: name or YAML file; none: {DEFAULT_RECIPE}.")
    ] = None
    also: Annotated[
        list[str] | None, typer.Option(help="With --model: INT8 by this recipe too; repeatable.")
    ] = None
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size; repeatable. None: 1, 8, 32, 128.")
    ] = None
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per sequence; repeatable. None: 128.")
    ] = None
    real_lengths: Annotated[
        str | None,
        typer.Option(help="Time the whole evaluation split of this task; other shapes if they are named."),
    ] = None
    real_batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size of --real-lengths; repeatable. None: 32.")
    ] = None
    data: Annotated[str | None, typer.Option(help="Data of --real-lengths; none: the run's.")] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of --real-lengths for a built-in shape.")
    ] = None
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Inferences at once; repeatable. None: 1 and 2.")
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of a contestant on a CPU. None: one for each core.")
    ] = None
    rounds: Annotated[int | None, typer.Option(min=1, help="Interleaved rounds. None: 12, on a CPU 6.")] = (
        None
    )
    seconds: Annotated[
        float, typer.Option(help="Latency time per contestant and shape, over all rounds.")
    ] = 1.0
    repeats: Annotated[int | None, typer.Option(min=1, help="Launches per round, instead of --seconds.")] = (
        None
    )
    peers: Annotated[bool, typer.Option(help="Measure PyTorch, torch.compile and other quantizers too.")] = (
        True
    )
    fp32: Annotated[bool, typer.Option(help="Measure the FP32 twin too.")] = True
    compile_seconds: Annotated[
        float, typer.Option(help="For each shape and mode of torch.compile; what takes longer is left out.")
    ] = 90.0
    profile: Annotated[
        str, typer.Option(help="Engines for the recipe's shapes (recipe), each shape (static), or both.")
    ] = "both"
    cpu: Annotated[bool, typer.Option("--cpu", help="On the CPU, even where a GPU is.")] = False
    keep_engines: Annotated[
        bool,
        typer.Option("--keep-engines", help="Leave the engines in the work folder, for inspect or again."),
    ] = False
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only export, build and compile, for a bench that follows.")
    ] = False
    without: Annotated[
        list[str] | None, typer.Option(help="Contestant to leave out, by its name in bench.json; repeatable.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, inputs and bootstrap.")] = 0


@grouped
def bench(  # noqa: PLR0913  (a command's options)
    target: Annotated[Path | None, typer.Argument(help="Run directory.", show_default=False)] = None,
    *,
    wanted: Wanted,
    trtexec: Annotated[
        bool, typer.Option("--trtexec", help="Measure nothing: take the times that trtexec exported.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder; none: that of the run, or one in runs/.")] = None,
    replace: Replace = False,
    json: Json = False,
) -> None:
    """INT8 against its twins, PyTorch and other quantizers, on a GPU or a CPU: interleaved and verified."""
    from qdqbench.eval.api.bench import bench as measure
    from qdqbench.eval.api.trtexec import trtexec_bench
    from qdqbench.eval.benchreport.report import bench_summary
    from qdqbench.eval.runreport.report import too_slow
    from qdqbench.quantize.core.errors import CheckFailed, UserError

    written: list[Path] = []
    if trtexec:
        if target is None or out is not None or wanted != Wanted():
            raise UserError("--trtexec takes what trtexec measured of a run; give the run directory alone")
        found = trtexec_bench(target, written=written.append, command=command_line())
    else:
        with status() as announce:
            found = measure(
                target,
                **asdict(wanted),
                out=out,
                replace=replace,
                note=note,
                progress=announce,
                written=written.append,
                command=command_line(),
            )
    if wanted.prepare and json:
        show_json(found)
        return
    if wanted.prepare:
        say("engines and compiled models are kept: run the same command without --prepare")
        return
    show(found, json, bench_summary, *(f"report: {path}" for path in written))
    if found.errors:
        raise CheckFailed(f"{len(found.errors)} measurements failed: {'; '.join(found.errors)}")
    if target is not None and (slow := too_slow(target)):
        raise CheckFailed(f"the gate does not hold: {'; '.join(slow)}")
