"""The commands `bench` and `tables`; registered in cli.py. Everything heavy is imported inside."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.quantize.cli.progress import status
from qdqbench.quantize.cli.terminal import command_line, console

if TYPE_CHECKING:
    from qdqbench.eval.bench.cell import Options
    from qdqbench.eval.bench.results import Bench
    from qdqbench.eval.bench.target import Target

DEFAULT_BATCHES, DEFAULT_CPU_BATCHES = (1, 8, 32, 128), (1, 8)
DEFAULT_ROUNDS, DEFAULT_CPU_ROUNDS = 12, 6  # 12 is balanced for 2, 3, 4 and 6 contestants
DEFAULT_RECIPE = "bert-int8-linears"


def bench(  # noqa: PLR0913, PLR0917  (a command's options)
    target: Annotated[Path | None, typer.Argument(help="Run directory.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, or bert-base or bert-large with random weights.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help=f"With --model: name or YAML file; none: {DEFAULT_RECIPE}.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size; repeatable. None: 1, 8, 32, 128.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per sequence; repeatable. None: 128.")
    ] = None,
    real_lengths: Annotated[
        str | None, typer.Option(help="Also time the whole evaluation split of this task.")
    ] = None,
    real_batch: Annotated[int, typer.Option(min=1, help="Batch size of --real-lengths.")] = 32,
    data: Annotated[str | None, typer.Option(help="Data of --real-lengths; none: the run's.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of --real-lengths for a built-in shape.")
    ] = None,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Inferences at once; repeatable. None: 1 and 2.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Interleaved rounds. None: 12, on a CPU 6.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Latency time per contestant and shape, over all rounds.")
    ] = 1.0,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Launches per round, instead of --seconds.")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure PyTorch and torch.compile too.")] = True,
    fp32: Annotated[bool, typer.Option(help="Measure the FP32 twin too.")] = True,
    compile_mode: Annotated[
        str, typer.Option(help="torch.compile mode: default, or a max-autotune one.")
    ] = "default",
    profile: Annotated[
        str,
        typer.Option(help="Engines for exactly each shape (static), or for the recipe's shapes (recipe)."),
    ] = "static",
    cpu: Annotated[bool, typer.Option(help="ONNX Runtime and PyTorch on the CPU, no engine.")] = False,
    keep_engines: Annotated[
        bool, typer.Option("--keep-engines", help="Leave the engines in the work folder, for inspect.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, inputs and bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder; none: that of the run, or one in runs/.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """INT8 against its FP16 and FP32 twins and PyTorch: interleaved, verified, with clock and power."""
    from qdqbench.eval.bench.cell import Options
    from qdqbench.eval.bench.target import check_lengths, real_split
    from qdqbench.quantize.core.errors import UserError

    _check_target(target, model, recipe, profile, compile_mode)
    if not seconds > 0:
        raise UserError(f"--seconds is {seconds}; give a positive number")
    if not cpu:
        _require_gpu(target, recipe)
    with status(quiet=json) as announce:
        announce("exporting")
        chosen, folder = _open(target, model, recipe, out, seed)
        real = None
        if real_lengths is not None:
            real = real_split(chosen, real_lengths, batch=real_batch, data=data, tokenizer=tokenizer)
        lengths = tuple(dict.fromkeys(length or (128,)))
        check_lengths(chosen, lengths)
        options = Options(
            batches=tuple(dict.fromkeys(batch or (DEFAULT_CPU_BATCHES if cpu else DEFAULT_BATCHES))),
            lengths=lengths,
            real=real,
            real_batch=real_batch,
            streams=tuple(dict.fromkeys(streams or (1, 2))),
            rounds=rounds or (DEFAULT_CPU_ROUNDS if cpu else DEFAULT_ROUNDS),
            seconds=seconds,
            repeats=repeats,
            peers=peers,
            fp32=fp32,
            compile_mode=compile_mode,
            profile=profile,  # type: ignore[arg-type]
            seed=seed,
            cpu=cpu,
            keep_engines=keep_engines,
        )
        found = _measure(chosen, options, folder, announce)
    _finish(found, folder, json)


def tables(
    results: Annotated[
        list[Path], typer.Argument(help="results.json, bench.json, study.json, search.json, or folders.")
    ],
    into: Annotated[Path, typer.Option(help="Markdown file with the markers.")] = Path("recipes/README.md"),
    check: Annotated[bool, typer.Option(help="Change nothing; exit status 2 when it would change.")] = False,
) -> None:
    """Write measured tables between the markers of a Markdown file, from results files and nothing else."""
    from qdqbench.eval.tables.write import find_results, find_searches, find_studies, insert, tables_markdown
    from qdqbench.quantize.core import files
    from qdqbench.quantize.core.errors import CheckFailed, UserError

    runs, benches = find_results(results)
    studies, searches = find_studies(results), find_searches(results)
    try:
        before = into.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {into} ({error}); give --into a Markdown file") from error
    after = insert(before, tables_markdown(runs, benches, studies, searches), str(into))
    if check:
        if after != before:
            raise CheckFailed(f"{into} does not hold these results; write it with `qdqbench tables`")
        return
    files.write_text(into, after)
    counted = f"{len(runs)} runs, {len(benches)} benches, {len(studies)} studies, {len(searches)} searches"
    console().print(f"{into}: {counted}", highlight=False, soft_wrap=True)


def _check_target(
    target: Path | None, model: str | None, recipe: str | None, profile: str, compile_mode: str
) -> None:
    from qdqbench.eval.bench.peers import COMPILE_MODES
    from qdqbench.quantize.core.errors import UserError

    if (target is None) == (model is None):
        raise UserError("give either a run directory or --model (a folder, bert-base or bert-large)")
    if target is not None and recipe is not None:
        raise UserError(f"--recipe belongs to --model; {target} has a recipe of its own")
    if profile not in ("static", "recipe"):
        raise UserError(f"--profile {profile!r} is unknown; use static or recipe")
    if compile_mode not in COMPILE_MODES:
        raise UserError(f"--compile-mode {compile_mode!r} is unknown; use {' or '.join(COMPILE_MODES)}")


def _require_gpu(target: Path | None, recipe: str | None) -> None:
    """Say what is missing before minutes are spent on an export."""
    from qdqbench.eval.bench.run import require_gpu
    from qdqbench.quantize.recipe.schema import load_recipe
    from qdqbench.quantize.rundir.session import read_config

    wanted = read_config(target).recipe if target else load_recipe(recipe or DEFAULT_RECIPE).ptq
    require_gpu(wanted.engine.backend)


def _open(
    target: Path | None, model: str | None, recipe: str | None, out: Path | None, seed: int
) -> "tuple[Target, Path]":
    from qdqbench.eval.bench.target import model_target, run_target
    from qdqbench.quantize.recipe.schema import load_recipe

    if target is not None:
        return run_target(target), out or target
    assert model is not None
    loaded = load_recipe(recipe or DEFAULT_RECIPE).ptq
    folder = out or Path("runs") / f"bench-{Path(model).name}-{loaded.name}"
    return model_target(model, loaded, folder / "work", seed), folder


def _measure(target: "Target", options: "Options", folder: Path, announce: Callable[[str], None]) -> "Bench":
    from qdqbench.eval.bench.results import FILE, write_bench
    from qdqbench.eval.bench.run import run_bench

    return run_bench(
        target,
        options,
        command=command_line(),
        save=lambda found: write_bench(folder / FILE, found),
        announce=announce,
    )


def _finish(found: "Bench", folder: Path, json: bool) -> None:
    """Reports, terminal and exit status."""
    from qdqbench.eval.bench.report import summary, write_bench_reports
    from qdqbench.eval.runs.report import refresh_reports
    from qdqbench.quantize.core.errors import CheckFailed

    refreshed, why = refresh_reports(folder)
    if why:
        found = found.model_copy(update={"warnings": [*found.warnings, why]})
    written = [*write_bench_reports(found, folder), *refreshed]
    if json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    else:
        console().print(summary(found))
        for path in written:
            console().print(f"report: {path}", highlight=False, soft_wrap=True)
    if found.errors:
        raise CheckFailed(f"{len(found.errors)} measurements failed: {'; '.join(found.errors)}")
