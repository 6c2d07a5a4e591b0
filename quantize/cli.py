"""The command line. Everything heavy is imported inside the commands, so that help is instant."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Explicit Q/DQ INT8 for BERT: recipe, ONNX, TensorRT engine, proof and accuracy report.",
)
recipes_app = typer.Typer(no_args_is_help=True, help="List, show and validate recipes.")
app.add_typer(recipes_app, name="recipes")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Run = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]
DEFAULT_RECIPE = "bert-int8-linears"


@recipes_app.command("list")
def recipes_list(json: Json = False) -> None:
    """List the shipped recipes."""
    from qdqbench.quantize.recipe import load_recipe, shipped_recipes

    names = list(shipped_recipes())
    if json:
        _print_json(names)
        return
    from rich.table import Table

    table = Table("recipe", "what it does", box=None)
    for name in names:
        table.add_row(name, load_recipe(name).description)
    _console().print(table)


@recipes_app.command("show")
def recipes_show(
    recipe: str, resolved: Annotated[bool, typer.Option(help="With every default written out.")] = False
) -> None:
    """Print a recipe as YAML."""
    from qdqbench.quantize.recipe import dump_recipe, load_recipe, shipped_recipes

    loaded = load_recipe(recipe)
    if resolved:
        sys.stdout.write(dump_recipe(loaded))
        return
    shipped = shipped_recipes()
    source = shipped[recipe] if recipe in shipped else Path(recipe)
    sys.stdout.write(source.read_text(encoding="utf-8"))


@recipes_app.command("validate")
def recipes_validate(recipe: list[str]) -> None:
    """Check recipe files without loading a model."""
    from qdqbench.quantize.recipe import load_recipe

    for name in recipe:
        load_recipe(name)
        _console().print(f"{name}: valid", highlight=False)


@app.command()
def run(  # noqa: PLR0913, PLR0917  (a command's options)
    recipe: Annotated[str, typer.Argument(help="Shipped name or YAML file.")] = DEFAULT_RECIPE,
    model: Annotated[str | None, typer.Option(help="Folder or hub id; none: the embedded default.")] = None,
    task: Annotated[str | None, typer.Option(help="GLUE task, or a free name with --text-column.")] = None,
    data: Annotated[str, typer.Option(help="hub, hub:OWNER/NAME[:CONFIG] or a folder.")] = "hub",
    out: Annotated[Path | None, typer.Option(help="Run directory; none: runs/RECIPE-TASK.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate on this many samples; the report warns.")
    ] = None,
    text_column: Annotated[
        list[str] | None, typer.Option(help="Text column of your own data; twice for pairs.")
    ] = None,
    label_column: Annotated[str | None, typer.Option(help="Label column of your own data.")] = None,
    num_labels: Annotated[
        int | None, typer.Option(min=1, help="Classes of your own data; 1 is regression.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metrics of your own data, the first decides.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Evaluation batch size.")] = 32,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of bootstrap, parity draw and embedded default.")
    ] = 0,
    until: Annotated[
        str | None, typer.Option(help="Stop after this stage; the others can follow later.")
    ] = None,
    json: Json = False,
) -> None:
    """The main job: recipe and model in, engine and report out."""
    from qdqbench.eval.tasks import EMBEDDED, get_task
    from qdqbench.quantize.errors import UserError
    from qdqbench.quantize.pipeline import open_run
    from qdqbench.quantize.recipe import load_recipe
    from qdqbench.quantize.session import RunConfig

    loaded = load_recipe(recipe)
    if (model is None) != (task is None):
        raise UserError("--model and --task belong together; give both, or neither for the embedded default")
    chosen = (
        EMBEDDED
        if task is None
        else get_task(
            task,
            text_columns=text_column or (),
            label_column=label_column,
            num_labels=num_labels,
            metrics=metric or (),
        )
    )
    config = RunConfig(
        recipe=loaded,
        model=model,
        task=chosen,
        data=data,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        command=_command_line(),
    )
    folder = out or Path("runs") / f"{loaded.name}-{chosen.name}"
    _go(open_run(config, folder), until, json)


def _stage_command(name: str, stage: str, text: str) -> None:
    """A sub-command that takes a run directory up to one stage."""

    def command(folder: Run, json: Json = False) -> None:
        from qdqbench.quantize.session import Session, read_config

        _go(Session(read_config(folder), folder), stage, json)

    command.__doc__ = text
    app.command(name)(command)


_stage_command("quantize", "quantize", "Calibrate: write calibration.json (amax, data, lengths).")
_stage_command("export", "export", "Write the INT8 ONNX file and its FP32 and FP16 twins.")
_stage_command("build", "build", "Build the engine and prove from its layers what runs in INT8.")
_stage_command("evaluate", "evaluate", "Measure accuracy of every stage.")
_stage_command("report", "report", "Write results.json, report.md and report.html.")


@app.command()
def check(
    onnx_file: Path,
    recipe: Annotated[str | None, typer.Option(help="Hold the quantized set to this recipe.")] = None,
    json: Json = False,
) -> None:
    """Check any ONNX file: what will run in INT8, and what an engine would refuse or get wrong."""
    from qdqbench.quantize.check import check_file, to_json
    from qdqbench.quantize.onnx_modules import recipe_modules

    expected = recipe_modules(onnx_file, recipe) if recipe else None
    report = check_file(onnx_file, expected_quantized=expected)
    if json:
        _print_json(to_json(report))
    else:
        _print_check(report)
    if report.findings:
        raise typer.Exit(2)


@app.command()
def profile(folder: Run, json: Json = False) -> None:
    """Wall time and peak memory of each stage of a finished run."""
    from pydantic import ValidationError

    from qdqbench.eval.results import Results
    from qdqbench.quantize import files
    from qdqbench.quantize.errors import UserError

    path = folder / "results.json"
    try:
        timings = Results.model_validate(files.read_json(path)).model_dump()["timings"]
    except ValidationError as error:
        raise UserError(f"{path} is no report of this version; run `qdqbench report {folder}`") from error
    if json:
        _print_json(timings)
        return
    from rich.table import Table

    table = Table("stage", "wall s", "peak MB", "", box=None)
    for name, row in timings.items():
        table.add_row(
            name,
            f"{row['wall_s']:.1f}",
            f"{row['peak_rss_bytes'] / 1e6:.0f}",
            "reused" if row["reused"] else "",
        )
    table.add_row(
        "total",
        f"{sum(row['wall_s'] for row in timings.values()):.1f}",
        f"{max(row['peak_rss_bytes'] for row in timings.values()) / 1e6:.0f}",
        "",
    )
    _console().print(table)


def _go(session: Any, until: str | None, json: bool) -> None:
    """Run the stages up to a target; after the last one, write and judge the report."""
    from qdqbench.quantize.errors import CheckFailed
    from qdqbench.quantize.run import run_until

    results = run_until(session, until, quiet=json)
    if results is None:
        if until == "build":
            _judge_build(session.folder)
        return
    if json:
        sys.stdout.write(results.model_dump_json(indent=2) + "\n")
    else:
        from qdqbench.eval.report import summary_lines

        _console().print(summary_lines(results))
        _console().print(f"report: {session.folder / 'report.html'}", highlight=False, soft_wrap=True)
    if not results.gate.passed:
        raise CheckFailed(f"the gate does not hold: {'; '.join(results.gate.failures)}")


def _judge_build(folder: Path) -> None:
    """Exit status of an engine on its own: 3 when it could not be built, 2 when its INT8 is not proven."""
    from qdqbench.eval.results import EngineResult
    from qdqbench.quantize import files
    from qdqbench.quantize.build import require_int8
    from qdqbench.quantize.errors import MissingDevice

    built = files.read_json(folder / "build.json")
    if "skipped" in built:
        raise MissingDevice(built["skipped"])
    result = EngineResult.model_validate(built)
    _console().print(
        f"{result.file}: {result.int8_gemms} of {result.expected_int8_gemms} GEMMs in INT8, "
        f"{result.backend} {result.version}",
        highlight=False,
    )
    require_int8(result)


def _print_check(report: Any) -> None:
    console = _console()
    for row in report.findings:
        colour = "red" if row.severity == "error" else "yellow"
        console.print(f"[{colour}]{row.severity}[/] {row.code} at [bold]{_plain(row.node)}[/]")
        console.print(f"  why: {_plain(row.why)}\n  fix: {_plain(row.fix)}", highlight=False)
    console.print(
        f"{len(report.quantized)} of {len(report.quantized) + len(report.not_quantized)} MatMul/Gemm nodes "
        f"in INT8, {len(report.findings)} findings",
        highlight=False,
    )


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _print_json(value: Any) -> None:
    import json

    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def _console() -> Any:
    from rich.console import Console

    return Console()


def _command_line() -> str:
    import shlex

    return shlex.join(["qdqbench", *sys.argv[1:]])


def _invoke() -> None:
    """Run the command; typer's own main exits with 2 and a box for a wrong option, with 130 for Ctrl-C."""
    from qdqbench.quantize.errors import UserError

    usage_error: Any = typer.BadParameter.__mro__[1]  # click's class, which newer typers bring along
    try:
        command = typer.main.get_command(app)
        with command.make_context("qdqbench", sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except usage_error as error:
        message = " ".join(error.format_message().split())
        if not message:  # no command was given, and the help that then is shown has been printed
            sys.exit(1)
        where = error.ctx.command_path if error.ctx else "qdqbench"
        raise UserError(f"{message.rstrip('.')}; see `{where} --help`") from error


def main() -> None:
    """Entry point: errors become one sentence on stderr and an exit status."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    from qdqbench.quantize.errors import QdqError

    try:
        _invoke()
    except BrokenPipeError:  # `qdqbench ... | head`; what is still buffered has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except QdqError as error:
        if debug:
            raise
        sys.stderr.write(f"qdqbench: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("qdqbench: interrupted; finished stages are kept, run the same command to go on\n")
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        sys.stderr.write(f"qdqbench: unexpected failure, {what}; run again with --debug for the traceback\n")
        sys.exit(1)
