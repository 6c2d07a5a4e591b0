"""The command `doctor`: what this machine can do. Everything heavy is imported inside."""

import sys

from qdqbench._options import DoctorOptions
from qdqbench.cli.options import command
from qdqbench.cli.terminal import Html, Json, show_found
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice


@command
def doctor(*, options: DoctorOptions, json: Json = False, html: Html = None) -> None:
    """Show what this machine can do: libraries, backends, known hazards, and what to install."""
    from qdqbench.quantize.lint.doctor import anonymous, look
    from qdqbench.quantize.lint.reports import doctor_report
    from qdqbench.quantize.report.render import render_markdown

    found = look(offline=options.offline)
    report = doctor_report(found)
    if options.report and not json:
        sys.stdout.write("\n".join(map(anonymous, render_markdown(report).split("\n"))))
    else:
        show_found(found, json, html, report)
    if options.backend is not None:
        name = found.auto if options.backend == "auto" else options.backend
        state = found.backends[name]
        if not state.runs:
            raise MissingDevice(f"{name} cannot run here: {state.why}")
    if found.unmet:
        raise CheckFailed(f"{len(found.unmet)} requirements are not met: {'; '.join(found.unmet)}")
