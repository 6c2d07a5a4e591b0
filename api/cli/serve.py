"""The commands `serve`, `deploy`, `push` and `export-triton`. Everything heavy is imported inside."""

from pathlib import Path
from typing import Annotated

import typer

from qdqbench._progress import displayed
from qdqbench.cli.options import command
from qdqbench.cli.terminal import Json, RunFolder, plain, say, show_json
from qdqbench.quantize.deployment.server.settings import Settings
from qdqbench.quantize.utils.errors import MissingDevice
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.progress import reporter

EXTRA = ("fastapi", "starlette", "uvicorn", "prometheus_client")  # of the extra `serve`


@command
def serve(run: RunFolder, settings: Settings) -> None:
    """Answer requests over HTTP with a run's engine, and compare it with FP32 on a page; for small loads."""
    try:
        from qdqbench.quantize.deployment.server import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise MissingDevice(
            f"serve needs {error.name}, which is not installed; `{install_command('serve')}`"
        ) from error
    from qdqbench.quantize.deployment.server.served import open_served

    served = open_served(run, fp32=not settings.no_fp32)

    def announce(url: str, loopback: bool) -> None:
        what = f"{served.task.kind.name}, {served.recipe}, {served.made_with}"
        say(f"serving [bold]{plain(str(run))}[/] ({plain(what)}) at {url}")
        say(f"POST {url}/v1/{served.endpoint.name}, described at {url}/docs; Ctrl-C stops")
        if not loopback:
            say("[yellow]warning[/] who reaches this address can ask: put a proxy with TLS before it")

    server.serve(served, settings, announce)


Fp32 = Annotated[bool, typer.Option("--fp32", help="FP32 twin as onnx/model.onnx.")]


def deploy(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for copies (default: RUN/deploy).")
    ] = None,
    fp32: Fp32 = False,
    json: Json = False,
) -> None:
    """Write a finished run for deployment: graphs, engine, tokenizer, card, scripts without qdqbench."""
    from qdqbench.cli.schemas import HandedOver
    from qdqbench.eval.runs.report.report import deploy as write
    from qdqbench.eval.runs.report.report import where_to_begin

    with displayed():
        reporter().begin("writing")
        made = write(run, out, fp32=fp32)
    begin = where_to_begin(made, made)
    if json:
        paths = (path for path in sorted(made.rglob("*")) if path.is_file())
        sizes = {str(path.relative_to(made)): path.stat().st_size for path in paths}
        show_json(HandedOver(folder=str(made), files=sizes, entry_point=begin))
        return
    say(f"deploy: {plain(begin)}")


def push(  # noqa: PLR0913
    run: RunFolder,
    repository: Annotated[str, typer.Argument(help="Repository on the Hub, OWNER/NAME.", show_default=False)],
    *,
    private: Annotated[bool, typer.Option("--private", help="Private repository.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Pull request, no commit.")] = False,
    fp32: Fp32 = False,
    json: Json = False,
) -> None:
    """Write the deploy folder of a run whose gate passed, and upload it to the Hugging Face Hub."""
    from qdqbench.cli.schemas import Pushed
    from qdqbench.eval.runs.report.report import deploy as write
    from qdqbench.quantize.deployment.push import push_folder
    from qdqbench.quantize.pipeline.ownership import locked_for_reading

    with displayed():
        reporter().begin("writing")
        made = write(run, fp32=fp32)
        reporter().begin("uploading")
        with locked_for_reading(run):
            url = push_folder(made, repository, private=private, create_pr=create_pr)
    if json:
        show_json(Pushed(repository=repository, url=url))
        return
    say(f"pushed: {plain(url)}")


def export_triton(
    run: RunFolder,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to create.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the model in Triton (default: the run's folder).")
    ] = None,
    json: Json = False,
) -> None:
    """Write a run as a model repository of NVIDIA Triton, with files to deploy it."""
    from dataclasses import asdict

    from qdqbench.cli.schemas import TritonRepository
    from qdqbench.quantize.deployment.triton.export import export_triton as export

    with displayed():
        reporter().begin("writing")
        made = export(run, out, name)
    if json:
        show_json(TritonRepository(folder=str(out), **asdict(made)))
        return
    plans = {
        "built": "its TensorRT plan is that of the run",
        "script": f"{out / 'tensorrt' / 'build_plan.sh'} builds its TensorRT plan on your GPU",
        "none": "without a TensorRT plan: the run's graph is for CPUs",
    }
    say(f"[bold]{plain(made.name)}[/] on {made.backend}; {plain(plans[made.plan])}")
    lengths = (
        f"{made.lengths[0]} to {made.lengths[-1]} tokens" if made.lengths[1:] else f"{made.lengths[0]} tokens"
    )
    say(f"batches of at most {made.max_batch}, {lengths}; how to start it: {plain(str(out / 'README.md'))}")
