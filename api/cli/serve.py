"""The commands `serve`, `deploy`, `predict`, `push` and `export-triton`."""

from dataclasses import asdict
from pathlib import Path

from qdqbench._options import DeployOptions, PushOptions, TritonOptions
from qdqbench.cli.answer import Answer
from qdqbench.cli.schemas import HandedOver, Pushed, TritonRepository
from qdqbench.cli.terminal import plain, say
from qdqbench.eval.runs.report.report import deploy as write
from qdqbench.eval.runs.report.report import where_to_begin
from qdqbench.quantize.deployment import triton
from qdqbench.quantize.deployment.opened import open_served
from qdqbench.quantize.deployment.options import PredictOptions, ServeOptions
from qdqbench.quantize.deployment.predict import predict_files
from qdqbench.quantize.deployment.write import push_folder
from qdqbench.quantize.pipeline.ownership import locked_for_reading
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.system.gpu import count_gpus
from qdqbench.quantize.utils.system.process import find_python

EXTRA = ("httptools", "msgspec")  # of the extra `serve`


def serve(run: Path, options: ServeOptions) -> None:
    try:
        from qdqbench.quantize.standalone.server import server
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        raise MissingDevice(
            f"serve needs {error.name}, which is not installed; `{install_command('serve')}`"
        ) from error
    server.prepare(open_served.__module__, *(["torch"] if count_gpus() else []))
    served = open_served(run, options)

    def announce(url: str, loopback: bool) -> None:
        what = f"{served.told['kind']}, {served.recipe}, {served.made_with}"
        say(f"serving [bold]{plain(str(run))}[/] ({plain(what)}) at {url}")
        say(f"{url}/v1/model describes it; Ctrl-C stops")
        if not loopback:
            say("[yellow]warning[/] who reaches this address can ask: put a proxy with TLS before it")

    try:
        server.serve(served, options.settings(), announce)
    except server.Failed as error:
        raise (MissingDevice if error.code == MissingDevice.exit_code else UserError)(str(error)) from error


def deploy(options: DeployOptions) -> Answer:
    reporter().begin("writing")
    made = write(options.run, options.out, fp32=options.fp32)
    begin = where_to_begin(made, made, python=find_python())
    paths = (path for path in sorted(made.rglob("*")) if path.is_file())
    sizes = {str(path.relative_to(made)): path.stat().st_size for path in paths}
    return Answer(HandedOver(folder=str(made), files=sizes, entry_point=begin), None, [f"deploy: {begin}"])


def predict(options: PredictOptions) -> Answer:
    made = predict_files(options)
    rate = f"{made.rows_per_second:,.0f} rows/s" if made.rows_per_second else "in one part"
    lines = [f"{made.out}: {made.rows:,} rows, {rate}"]
    if made.resumed:
        lines.append(f"{made.resumed:,} rows of them were answered by an earlier call")
    if made.unanswered:
        lines.append(f"{made.unanswered:,} rows have no answer: a text is null, or takes too many windows")
    return Answer(made, None, lines)


def push(options: PushOptions) -> Answer:
    reporter().begin("writing")
    made, repository = write(options.run, fp32=options.fp32), options.repository
    reporter().begin("uploading")
    with locked_for_reading(options.run):
        url = push_folder(made, repository, private=options.private, create_pr=options.create_pr)
    return Answer(Pushed(repository=repository, url=url), None, [f"pushed: {url}"])


def export_triton(options: TritonOptions) -> Answer:
    reporter().begin("writing")
    deployed = write(options.run)
    with locked_for_reading(options.run):
        made = triton.export_triton(deployed, options.out, options.name)
    lines = [
        f"{made.name} on {made.runtime}; it has what these need: {', '.join(made.runtimes)}",
        f"batches of at most {made.max_batch} texts; how to start it: {options.out / 'README.md'}",
    ]
    return Answer(TritonRepository(folder=str(options.out), **asdict(made)), None, lines)
