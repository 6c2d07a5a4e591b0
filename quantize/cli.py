"""The command line. Everything heavy is imported inside the commands, so that help is instant."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from qdqbench.quantize import (
    cli_bench,
    cli_cost,
    cli_inspect,
    cli_methods,
    cli_qat,
    cli_search,
    cli_sensitivity,
    cli_tools,
    cli_train,
    interrupt,
)
from qdqbench.quantize import cli_options as options
from qdqbench.quantize.cli_tools import Json, Run, console, print_json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Explicit Q/DQ INT8 for BERT: recipe, ONNX, TensorRT engine, proof and accuracy report.",
)
recipes_app = typer.Typer(no_args_is_help=True, help="List, show and validate recipes.")
app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def recipes_list(json: Json = False) -> None:
    """List the shipped recipes."""
    from qdqbench.quantize.recipe import load_recipe, shipped_recipes

    names = list(shipped_recipes())
    if json:
        print_json(names)
        return
    from rich.table import Table

    table = Table("recipe", "what it does", box=None)
    for name in names:
        table.add_row(name, load_recipe(name).description)
    console().print(table)


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
        console().print(f"{name}: valid", highlight=False)


@app.command()
def run(  # noqa: PLR0913, PLR0917  (a command's options)
    recipe: options.RecipeName = options.DEFAULT_RECIPE,
    model: options.ModelName = None,
    task: options.TaskName = None,
    data: options.Data = "hub",
    out: Annotated[Path | None, typer.Option(help="Run directory; none: runs/RECIPE-TASK.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate on this many samples; the report warns.")
    ] = None,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    num_labels: options.NumLabels = None,
    metric: options.Metrics = None,
    batch_size: options.BatchSize = 32,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of bootstrap, parity draw and embedded default.")
    ] = 0,
    until: Annotated[
        str | None, typer.Option(help="Stop after this stage; the others can follow later.")
    ] = None,
    json: Json = False,
) -> None:
    """The main job: recipe and model in, engine and report out."""
    from qdqbench.quantize.pipeline import open_run
    from qdqbench.quantize.recipe import load_recipe

    config = options.run_config(
        load_recipe(recipe),
        model=model,
        task=task,
        data=data,
        text_column=text_column,
        label_column=label_column,
        num_labels=num_labels,
        metric=metric,
        batch_size=batch_size,
        seed=seed,
        limit=limit,
    )
    folder = out or Path("runs") / f"{config.recipe.name}-{config.task.name}"
    go(open_run(config, folder), until, json)


def _stage_command(name: str, target: str, text: str) -> None:
    """A sub-command that takes a run directory up to one stage."""

    def command(folder: Run, json: Json = False) -> None:
        from qdqbench.quantize.gpu import find_gpu
        from qdqbench.quantize.session import Session, read_config

        stage = "verify" if target == "build" and find_gpu() else target
        go(Session(read_config(folder), folder), stage, json)

    command.__doc__ = text
    app.command(name)(command)


_stage_command("quantize", "quantize", "Calibrate: write calibration.json (amax, data, lengths).")
_stage_command("export", "export", "Write the INT8 ONNX file and its FP32 and FP16 twins.")
_stage_command("build", "build", "Build the engine, prove its INT8 layers, verify its outputs on a GPU.")
_stage_command("evaluate", "evaluate", "Measure accuracy of every stage.")
_stage_command("report", "report", "Write results.json, report.md and report.html.")


app.command()(cli_tools.check)
app.command()(cli_tools.profile)
app.command("inspect")(cli_inspect.inspect)
app.command("bench")(cli_bench.bench)
app.command("tables")(cli_bench.tables)
app.command("search")(cli_search.search)
app.add_typer(cli_cost.cost_app, name="cost")
app.command("sensitivity")(cli_sensitivity.sensitivity)
app.command("methods")(cli_methods.methods)
app.command("finetune")(cli_train.finetune)
app.command("qat")(cli_qat.qat)
app.command("study")(cli_train.study)


def go(session: Any, until: str | None, json: bool) -> None:
    """Run the stages up to a target; after the last one, write and judge the report."""
    from qdqbench.quantize.errors import CheckFailed
    from qdqbench.quantize.run import run_until

    results = run_until(session, until, quiet=json)
    if results is None:
        if until in ("build", "verify"):
            _judge_build(session, json)
        return
    if json:
        sys.stdout.write(results.model_dump_json(indent=2) + "\n")
    else:
        from qdqbench.eval.report import summary_lines

        console().print(summary_lines(results))
        console().print(f"report: {session.folder / 'report.html'}", highlight=False, soft_wrap=True)
    if not results.gate.passed:
        raise CheckFailed(f"the gate does not hold: {'; '.join(results.gate.failures)}")


def _judge_build(session: Any, json: bool) -> None:
    """Exit status of an engine on its own: 3 when it could not be built, 2 when it is not proven right."""
    from qdqbench.eval.results import EngineResult
    from qdqbench.quantize import files
    from qdqbench.quantize.build import require_int8
    from qdqbench.quantize.errors import CheckFailed, MissingDevice

    built = files.read_json(session.folder / "build.json")
    if "skipped" in built:
        raise MissingDevice(built["skipped"])
    result = EngineResult.model_validate(built)
    path = session.folder / "verify.json"
    verified = files.read_json(path) if path.is_file() else {"skipped": "not asked for"}
    if json:
        print_json(
            {"engine": result.model_dump(mode="json"), "verification": verified, "notes": session.notes}
        )
    else:
        for note in session.notes:
            console().print(f"[yellow]note[/] {cli_tools.plain(note)}", highlight=False)
        console().print(
            f"{result.file}: {result.int8_gemms} of {result.expected_int8_gemms} GEMMs in INT8, "
            f"{result.backend} {result.version}; outputs "
            + (f"not verified: {verified['skipped']}" if "skipped" in verified else "verified"),
            highlight=False,
        )
    require_int8(result)
    if verified.get("failures"):
        raise CheckFailed(
            f"{result.file} gives wrong outputs: {'; '.join(verified['failures'])}; find the tensor with "
            f"`qdqbench inspect {session.folder} --bisect`"
        )


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


FROM_THE_START = ("methods", "bench")  # commands that do not go on with what an interrupted call left


class _Interrupted(SystemExit):
    """Ctrl-C, after its message."""


def program() -> None:
    """The installed command: `main`, and after Ctrl-C an end that waits for no thread of a library."""
    interrupt.watch()
    try:
        main()
    except _Interrupted as stop:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(str(stop.code)))


def script(command: str) -> None:
    """A command as a script of its own: `python -m`, `accelerate launch -m` and `torchrun -m`."""
    sys.argv[1:1] = [command]
    program()


def main() -> None:
    """Command line in this process: errors become one sentence on stderr and an exit status."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    from qdqbench.quantize.errors import QdqError

    anew = any(name in sys.argv[1:2] for name in FROM_THE_START)
    try:
        _invoke()
    except BrokenPipeError:  # `qdqbench ... | head`; what is still buffered has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except QdqError as error:
        if debug:
            raise
        if os.environ.get("RANK", "0") == "0":  # every process of a training raises the same
            sys.stderr.write(f"qdqbench: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        kept = "" if anew else "finished stages are kept, "
        sys.stderr.write(
            f"qdqbench: interrupted; {kept}run the same command to {'start anew' if anew else 'go on'}\n"
        )
        raise _Interrupted(1) from None
    except Exception as error:
        if debug:
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        sys.stderr.write(f"qdqbench: unexpected failure, {what}; run again with --debug for the traceback\n")
        sys.exit(1)
