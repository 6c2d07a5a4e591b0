"""The command `doctor`: what this machine can do."""

from qdqbench._options import DoctorOptions
from qdqbench.cli.answer import Answer
from qdqbench.quantize.lint import doctor as lint
from qdqbench.quantize.lint.reports import doctor_report
from qdqbench.quantize.report.render import render_markdown
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, QdqError


def doctor(options: DoctorOptions) -> Answer:
    error: QdqError | None = None
    found = lint.look(offline=options.offline)
    report = doctor_report(found)
    text = "\n".join(map(lint.anonymous, render_markdown(report).split("\n")))
    if found.unmet:
        error = CheckFailed(f"{len(found.unmet)} requirements are not met: {'; '.join(found.unmet)}")
    if options.backend is not None:
        name = found.auto if options.backend == "auto" else options.backend
        state = found.backends[name]
        if not state.runs:
            error = MissingDevice(f"{name} cannot run here: {state.why}")
    return Answer(found.model_dump(mode="json"), text if options.report else report, error=error)
