"""The command `bench`; registered in cli.py. Everything heavy is imported inside."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from qdqbench.cli.options import Replace, grouped, note
from qdqbench.cli.progress import status
from qdqbench.cli.terminal import Json, command_line, say, show, show_json
from qdqbench.quantize.utils.names import DEFAULT_RECIPE


@dataclass(frozen=True)
class BenchArguments:
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
    extra_recipe: Annotated[
        list[str] | None, typer.Option(help="With --model: INT8 by this recipe too; repeatable.")
    ] = None
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size; repeatable. None: 1, 8, 32, 128.")
    ] = None
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per sequence; repeatable. None: 128.")
    ] = None
    dataset: Annotated[
        str | None,
        typer.Option(help="Task whose whole evaluation split is timed; other shapes if they are named."),
    ] = None
    dataset_batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size of --dataset; repeatable. None: 32.")
    ] = None
    data: Annotated[str | None, typer.Option(help="Data of --dataset; none: the run's.")] = None
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer of --dataset for a built-in shape.")] = None
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Inferences at once; repeatable. None: 1 and 2.")
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of a system on a CPU. None: one for each core.")
    ] = None
    rounds: Annotated[int | None, typer.Option(min=1, help="Interleaved rounds. None: 12, on a CPU 6.")] = (
        None
    )
    duration: Annotated[
        float, typer.Option(help="Seconds of latency per system and shape, over all rounds.")
    ] = 1.0
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Launches per round, instead of --duration.")
    ] = None
    baselines: Annotated[
        bool, typer.Option(help="PyTorch, torch.compile, unpadded FP16 and other quantizers too.")
    ] = True
    fp32: Annotated[bool, typer.Option(help="FP32 engine too.")] = True
    compile_seconds: Annotated[
        float, typer.Option(help="For each shape and mode of torch.compile; what takes longer is left out.")
    ] = 90.0
    engine_shapes: Annotated[
        Literal["both", "exact", "recipe"],
        typer.Option(help="Shapes of engines on a GPU: the recipe's, exactly each shape, or both."),
    ] = "both"
    cpu: Annotated[bool, typer.Option("--cpu", help="On the CPU, even where a GPU is.")] = False
    keep_engines: Annotated[
        bool,
        typer.Option("--keep-engines", help="Leave the engines in the work folder, for inspect or again."),
    ] = False
    build_only: Annotated[
        bool, typer.Option("--build-only", help="Only export, build and compile, for a bench that follows.")
    ] = False
    exclude: Annotated[
        list[str] | None, typer.Option(help="System to leave out, by its name in bench.json; repeatable.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, inputs and bootstrap.")] = 0


@grouped
def bench(
    target: Annotated[Path | None, typer.Argument(help="Run directory.", show_default=False)] = None,
    *,
    options: BenchArguments,
    out: Annotated[Path | None, typer.Option(help="Folder; none: that of the run, or one in runs/.")] = None,
    replace: Replace = False,
    json: Json = False,
) -> None:
    """INT8 against other engines, PyTorch and other quantizers, on a GPU or CPU: interleaved and verified."""
    from qdqbench._bench import bench as measure
    from qdqbench.eval.bench.report import bench_report
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.runs.report.report import too_slow
    from qdqbench.quantize.utils.errors import CheckFailed

    written: list[Path] = []
    with status() as announce:
        found = measure(
            target,
            **asdict(options),
            out=out,
            replace=replace,
            note=note,
            progress=announce,
            written=written.append,
            command=command_line(),
        )
    if options.build_only and json:
        show_json(found)
        return
    if options.build_only:
        say("engines and compiled models are kept: run the same command without --build-only")
        return
    show(
        found,
        json,
        lambda bench: render_screen(bench_report(bench)),
        *(f"report: {path}" for path in written),
    )
    if found.errors:
        raise CheckFailed(f"{len(found.errors)} measurements failed: {'; '.join(found.errors)}")
    if target is not None and (slow := too_slow(target)):
        raise CheckFailed(f"the gate does not hold: {'; '.join(slow)}")
