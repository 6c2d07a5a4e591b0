"""The command line. Everything heavy is imported inside the commands, so that help is instant."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from qdqbench._progress import displayed, reset_clock
from qdqbench.cli.commands import COMMANDS, EXAMPLES, PAGES, Command
from qdqbench.cli.options import take_typed
from qdqbench.cli.terminal import Html, Json, command_line, complain
from qdqbench.quantize.utils.errors import MissingDevice, QdqError, UserError
from qdqbench.quantize.utils.options import Options
from qdqbench.quantize.utils.system import process

NAME, COMPLETION = "qdqbench", "_QDQBENCH_COMPLETE"
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _typed(row: Command) -> Callable[..., None]:
    """Return the function of a row as typer takes it: it prints the answer, and raises its error."""

    def run(*, options: Options, json: bool = False, html: Path | None = None, **arguments: Any) -> None:
        module, _, name = row.function.partition(".")
        function = getattr(importlib.import_module(f"qdqbench.cli.{module}"), name)
        with displayed(row.steps is not None, row.steps or ""):
            answer = function(**arguments, options=options)
        if answer is not None and process.is_main_process():
            answer.show(json=json, html=html)
        if answer is not None and answer.error is not None:
            raise answer.error

    after = {"json": (Json, False)} if row.json else {}
    return take_typed(run, row.options, row.arguments, after | ({"html": (Html, None)} if row.html else {}))


recipes_app = typer.Typer(no_args_is_help=True, help="List, show, write, validate and document recipes.")
app.add_typer(recipes_app, name="recipes", rich_help_panel="Run")
for panel, rows in COMMANDS.items():
    for name, row in rows.items():
        group, _, own = name.rpartition(" ")
        more: dict[str, Any] = {"rich_help_panel": panel} if not group else {}
        page, example = EXAMPLES[name]
        end = f"Example: qdqbench {example}\n\nMore: {PAGES}/{page}"
        add = (recipes_app if group else app).command(own, epilog=end, help=row.help, **more)
        add(_typed(row))


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"qdqbench {version('qdqbench')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Explicit Q/DQ INT8 for BERT: recipe, ONNX, TensorRT engine, proof and accuracy report."""


def _invoke() -> None:
    """Run the command; typer's own main exits with 2 and a box for a wrong option, with 130 for Ctrl-C."""
    usage_error: Any = typer.BadParameter.__mro__[1]  # click's class, which newer typers bring along
    try:
        command, words = typer.main.get_command(app), sys.argv[1:]
        if COMPLETION in os.environ:  # a shell asks
            command.main(prog_name=NAME)
        if words[:1] == ["help"]:
            words = [*words[1:], "--help"]
        with command.make_context(NAME, words) as context:
            command.invoke(context)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except usage_error as error:
        message = " ".join(error.format_message().split()).replace("Value error, ", "")
        if not message:  # no command was given, and the help that then is shown has been printed
            sys.exit(1)
        where = error.ctx.command_path if error.ctx else NAME
        raise UserError(f"{message.rstrip('.')}; see `{where} --help`") from error


KEEPS_TORCH_DEFAULTS = ("bench",)  # commands that leave threads and memory as PyTorch does


class _Interrupted(SystemExit):
    """Ctrl-C or SIGTERM, after its message."""


def program() -> None:
    """The installed command: `main`, and the end of the process, without waiting for threads."""
    process.open_streams()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch
    if not any(name in sys.argv[1:2] for name in KEEPS_TORCH_DEFAULTS):
        process.use_passive_wait()
        process.disable_malloc_trim()
        process.relax_gc()
    try:
        process.interruption.watch()
        main()
    except _Interrupted:
        process.end_interrupted()
    except SystemExit as stop:
        process.exit_fast(int(str(stop.code or 0)))
    process.exit_fast(0)


def main() -> None:
    """Command line in this process: errors become one sentence on stderr and an exit status."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        reset_clock()
        try:
            with process.invoked_as(command_line()):
                _invoke()
        except Exception:
            process.interruption.raise_if_pending()  # a library made this error of Ctrl-C
            raise
    except BrokenPipeError:  # `qdqbench ... | head`; what is still buffered has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except QdqError as error:
        if debug:
            raise
        if process.is_main_process():  # every process of a training raises the same
            complain(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        named = {name: row for rows in COMMANDS.values() for name, row in rows.items()}
        resumes = any(name in named and named[name].resumes for name in sys.argv[1:2])
        kept, then = ("what is finished is kept, and ", "resumes") if resumes else ("", "starts from scratch")
        if process.is_main_process():
            complain(f"interrupted; {kept}the same command {then}")
        raise _Interrupted(process.interruption.status) from None
    except Exception as error:
        if debug:
            raise
        from qdqbench.quantize.utils.files import full_disk, vanished
        from qdqbench.quantize.utils.names import COMPUTES_WITH, install_command
        from qdqbench.quantize.utils.system.gpu import explain_refusal

        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in COMPUTES_WITH:
            complain(f"this needs {error.name}, which is not installed; `{install_command('quantize')}`")
            sys.exit(MissingDevice.exit_code)
        if told := full_disk(error) or vanished(error, ["runs", *sys.argv[1:]]) or explain_refusal(error):
            complain(str(told))
            sys.exit(told.exit_code)
        what = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        complain(f"unexpected failure, {what}; run again with --debug for the traceback")
        sys.exit(1)
