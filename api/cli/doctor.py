"""The command `doctor`: what this machine can do. Everything heavy is imported inside."""

import sys
from typing import TYPE_CHECKING, Any

from qdqbench._options import DoctorOptions
from qdqbench.cli.options import command
from qdqbench.cli.terminal import Json, console, print_json
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice
from qdqbench.quantize.utils.names import clean

if TYPE_CHECKING:
    from qdqbench.quantize.lint.doctor import Doctor


@command
def doctor(*, options: DoctorOptions, json: Json = False) -> None:
    """Show what this machine can do: libraries, backends, known hazards, and what to install."""
    from qdqbench.quantize.lint.doctor import bug_report, look

    found = look(offline=options.offline)
    if json:
        print_json(found.model_dump(mode="json"))
    elif options.report:
        sys.stdout.write(bug_report(found))
    else:
        console().print(_doctor_screen(found))
    if options.backend is not None:
        name = found.auto if options.backend == "auto" else options.backend
        state = found.backends[name]
        if not state.runs:
            raise MissingDevice(f"{name} cannot run here: {state.why}")
    if found.unmet:
        raise CheckFailed(f"{len(found.unmet)} requirements are not met: {'; '.join(found.unmet)}")


def _doctor_screen(found: "Doctor") -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from qdqbench.quantize.lint.doctor import gib, gpu_text, library_text, package_text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    met = f"{len(found.packages)} required ones are there"
    facts = [
        ("qdqbench", package_text(found)),
        ("Python", found.python),
        ("system", found.platform),
        ("CPU", f"{found.cpu}, {found.cores} cores"),
        ("", f"INT8 and BF16: {', '.join(found.cpu_features) or 'not known'}"),
        ("GPU", gpu_text(found.gpu)),
        ("memory", f"{gib(found.memory_bytes)}, {gib(found.memory_free_bytes)} free"),
        ("disk", f"{gib(found.disk_free_bytes)} free in this folder"),
        ("hub", found.hub),
        ("torch", library_text(found.libraries["torch"])),
        ("packages", met if not found.unmet else f"{met}, {len(found.unmet)} do not fit"),
    ]
    for name, text in facts:
        grid.add_row(name, Text(clean(text)))
    backends = Table("backend", "version", "here", box=None, pad_edge=False, header_style="bold")
    for name, state in found.backends.items():
        own, can = found.libraries[name], "runs" if state.runs else "builds" if state.builds else "no"
        style = {"runs": "green", "builds": "yellow", "no": "yellow"}[can]
        told = can if state.why is None else f"{can}: {state.why}" if can != "no" else state.why
        label = f"{name} (auto)" if name == found.auto else name
        backends.add_row(label, own.version or "-", Text(clean(told), style=style))
    lines = [Text(clean(text), style="red") for text in found.unmet]
    lines += [Text.assemble(("hazard ", "yellow"), clean(text)) for text in found.hazards]
    lines.append(Text("for a bug report: qdqbench doctor --report"))
    return Group(grid, "", backends, "", *lines)
