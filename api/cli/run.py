"""The commands `run`, `qat`, `compare`, `timings`, and one for each stage of a run."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench._options import FolderOptions, QatOptions, RunOptions
from qdqbench._progress import displayed
from qdqbench.cli.options import RecipeName, command
from qdqbench.cli.terminal import Json, RunFolder, console, print_json, show, show_report
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.names import DEFAULT_QAT, DEFAULT_RECIPE
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.system.process import invocation

if TYPE_CHECKING:
    from qdqbench.eval.runs.results import Results


@command
def run(recipe: RecipeName = DEFAULT_RECIPE, *, options: RunOptions, json: Json = False) -> None:
    """Quantize, export, build, verify and evaluate a model, and write the report."""
    from qdqbench._runs import start_run

    with displayed(noun="stage"):
        results, folder = start_run(recipe, options)
    print_results(results, folder, json=json)


@command
def qat(recipe: RecipeName = DEFAULT_QAT, *, options: QatOptions, json: Json = False) -> None:
    """Train with quantization, then continue to engine and report; on one GPU or many."""
    from qdqbench._runs import start_run

    with displayed(noun="stage"):
        results, folder = start_run(recipe, options)
    print_results(results, folder, json=json)


def print_results(results: "Results", folder: Path, *, json: bool) -> None:
    """Print the results of a run; what does not hold is a `CheckFailed`."""
    from qdqbench.eval.runs.gate import issue_sentence
    from qdqbench.eval.runs.report.report import run_report, stages_report, where_to_begin
    from qdqbench.quantize.deployment.write import DEPLOY
    from qdqbench.quantize.report.render import render_screen

    failures = "; ".join(map(issue_sentence, results.gate.failures))
    if results.until is None:
        begin = where_to_begin(folder / DEPLOY, folder / DEPLOY)
        places = {"report": str(folder / "report.html"), **({"deploy": begin} if begin else {})}
        show_report(results, json, run_report, *(f"{name}: {path}" for name, path in places.items()))
        failures = f"the gate does not hold: {failures}"
    else:
        judged = f"the gate is judged by: qdqbench report {folder}"
        show(results, json, lambda each: render_screen(stages_report(each, folder)), judged)
    if not results.gate.passed:
        raise CheckFailed(failures)


def _stage_command(target: str, text: str) -> Callable[..., None]:
    def run_stage(folder: RunFolder, json: Json = False) -> None:
        from qdqbench._runs import resume

        with displayed(noun="stage"):
            found = resume(folder, target)
        print_results(found, folder, json=json)

    run_stage.__name__, run_stage.__doc__ = target, text
    return run_stage


quantize = _stage_command("quantize", "Calibrate: write calibration.json (amax, data, lengths).")
export = _stage_command("export", "Write the INT8 ONNX file and its FP32 and FP16 twins.")
evaluate = _stage_command("evaluate", "Measure accuracy of every stage.")
verify = _stage_command("verify", "Verify the outputs of the engine, if it runs here.")


def build(folder: RunFolder, json: Json = False) -> None:
    """Build the engine, prove its INT8 layers, verify its outputs if it runs here."""
    from qdqbench._runs import build as build_engine

    with displayed(noun="stage"):
        found = build_engine(folder)
    print_results(found, folder, json=json)


def report(
    folder: RunFolder,
    fp16: Annotated[bool, typer.Option("--fp16", help="Evaluate the FP16 twin too.")] = False,
    json: Json = False,
) -> None:
    """Write results.json, report.md and report.html."""
    from qdqbench._runs import resume

    for target in (["fp16"] if fp16 else []) + ["report"]:
        with displayed(noun="stage"):
            found = resume(folder, target)
    print_results(found, folder, json=json)


def timings(folder: RunFolder, json: Json = False) -> None:
    """Show wall time, CPU time and peak memory of each stage of a finished run."""
    from qdqbench.eval.runs.results import read_results

    found = read_results(folder)
    if json:
        print_json(found.model_dump()["timings"])
        return
    from rich.table import Table

    table = Table("stage", "wall s", "CPU s", "peak MB", "", box=None)
    rows = found.timings.values()
    for name, row in found.timings.items():
        reused = "reused" if row.reused else ""
        cpu = "-" if row.cpu_s is None else f"{row.cpu_s:.1f}"
        table.add_row(name, f"{row.wall_s:.1f}", cpu, f"{row.peak_rss_bytes / 1e6:.0f}", reused)
    wall, cpu_s = sum(row.wall_s for row in rows), sum(row.cpu_s or 0 for row in rows)
    peak = max(row.peak_rss_bytes for row in rows)
    table.add_row("total", f"{wall:.1f}", f"{cpu_s:.1f}", f"{peak / 1e6:.0f}", "")
    console().print(table)


@command
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.", show_default=False)],
    *,
    options: FolderOptions,
    json: Json = False,
) -> None:
    """Compare runs: accuracy on the same samples, changed predictions, speed, size and layers."""
    from qdqbench.eval.runs.comparison import NAME, compare_runs, comparison_report, write_comparison
    from qdqbench.quantize.pipeline.ownership import RunIdentity, owned_folder

    out = options.out or Path("runs/compare")
    compared = cache(partial(compare_runs, runs, invocation()))
    with displayed():
        reporter().begin("comparing")
        with owned_folder(out, RunIdentity(kind=NAME), overwrite=options.overwrite, ready=compared):
            found = compared()
            written = write_comparison(found, out)
    pages = (f"page: {path}" for path in written if path.suffix == ".html")
    show_report(found, json, comparison_report, *pages)
