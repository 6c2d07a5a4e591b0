"""What `check`, `diagnose`, `inspect` and `bench` find: one record, and its words (`findings.yaml`)."""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import onnx
import yaml

from qdqbench.quantize.engine.layers import format_nodes
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.limits import (
    ATTENTION_HEADS_TEXT,
    FP16_MAX,
    HEAD_SIZES_TEXT,
    INT8_ATTENTION_LENGTH,
)
from qdqbench.quantize.utils.schema import Strict, field

Severity = Literal["error", "warning"]
# What a finding does to an engine of TensorRT, in the order in which it matters. "not portable": ONNX Runtime
# refuses the file, TensorRT does not.
Effect = Literal["refused", "wrong", "not INT8", "not portable", "slow", "note"]


WORST_FIRST: tuple[Effect, ...] = get_args(Effect)
EFFECTS: dict[Effect, str] = {
    "refused": "no engine is built",
    "wrong": "answers can be wrong",
    "not INT8": "no gain from INT8",
    "not portable": "ONNX Runtime refuses the file",
    "slow": "time",
    "note": "worth knowing",
}
_LIMITS = {
    "heads": HEAD_SIZES_TEXT,
    "attention_heads": ATTENTION_HEADS_TEXT,
    "fp16_max": f"{FP16_MAX:.0f}",
    "int8_length": INT8_ATTENTION_LENGTH,
}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Share = tuple[float, str]  # a part of 1, and of what


@dataclass(frozen=True)
class Kind:
    """A row of the table."""

    effect: Effect
    title: str
    fixes: Sequence[str]
    severity: Severity
    why: str = ""
    signs: Sequence[str] = ()  # texts of which a line in a build log holds one
    named: str = ""  # pattern of what such a line names

    @property
    def edit(self) -> str:
        """Edit of the file for one place."""
        return fill(next(fix for fix in self.fixes if not fix.startswith("qdqbench ")))


def read_yaml(name: str) -> Any:
    """Return the content of a table in this folder."""
    return yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), _LOADER)  # noqa: S506


@cache
def read_kinds(section: str = "") -> dict[str, Kind]:
    """Return the rows of a section by code: graph, engine, build or log; of all without a name."""
    tables = read_yaml("findings.yaml")
    sections = [section] if section else [name for name, rows in tables.items() if isinstance(rows, dict)]
    rows = {code: row for name in sections for code, row in tables[name].items()}
    return {code: Kind(**{"severity": severity_of(row["effect"])} | row) for code, row in rows.items()}


def fill(text: str, values: Mapping[str, object] | None = None, *, strict: bool = False) -> str:
    """Fill limits of engines and `values` into a text; KeyError where one is missing (`strict`)."""
    known = _LIMITS | dict(values or {})
    return re.sub(
        r"\{(\w+)\}", lambda name: str(known[name[1]] if strict else known.get(name[1], name[0])), text
    )


def severity_of(effect: Effect) -> Severity:
    return "warning" if effect in ("slow", "note") else "error"


class FindingRow(Strict):
    """One place of a finding: a line of `check`."""

    severity: Severity = field("Severity; an `error` makes the exit status 2.")
    effect: Effect = field("Effect on an engine of TensorRT, or in ONNX Runtime (`not portable`).")
    code: str = field("Stable short name of the rule.")
    node: str = field("ONNX node or tensor.")
    why: str = field("Cause.")
    fix: str = field("Advice.")


class Finding(Strict):
    """All places of one fault, in one file or several."""

    code: str
    effect: Effect
    what: str  # one sentence in plain words
    why: str  # what it does, with an example where the file has one
    fixes: list[str]  # commands, or edits; the first is the shortest way
    nodes: list[str] = []  # all of them, by the names of the file
    where: str = ""  # the same in few words
    share: float | None = None  # of what `basis` says, touched by this
    basis: str = ""
    files: list[str] = []  # names of the files that show it

    @property
    def severity(self) -> Severity:
        """As in `check`: an error breaks or silently changes the engine."""
        return severity_of(self.effect)

    @property
    def place(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what

    @property
    def sentence(self) -> str:
        return f"{self.place}{'; ' if self.why else ''}{self.why}: {self.fixes[-1]}"


def find(  # noqa: PLR0913  words of the table, and what overrides them
    code: str,
    *,
    nodes: Sequence[str] = (),
    where: str | None = None,
    effect: Effect | None = None,
    why: str | None = None,
    fixes: Sequence[str] | None = None,
    share: Share | None = None,
    shown: Collection[str] = (),
    path: Path | None = None,
    **values: object,
) -> Finding:
    """Create a finding of the table; `values` fill its words, `path` is the ONNX file that commands name."""
    kind = read_kinds()[code]
    file = path or Path("MODEL.onnx")
    fixed = file.with_suffix(".fixed.onnx")
    if any((folder / files.SUMS).is_file() for folder in fixed.parents[:2]):
        fixed = Path(fixed.name)
    known: dict[str, object] = {"n": len(nodes), "layers": "layers.json"}
    known |= {"file": shlex.quote(str(file)), "fixed": shlex.quote(str(fixed))} | values
    return Finding(
        code=code,
        effect=effect or kind.effect,
        what=fill(kind.title, known, strict=True),
        why=fill(kind.why, known, strict=True) if why is None else why,
        fixes=[fill(text, known, strict=True) for text in (kind.fixes if fixes is None else fixes)],
        nodes=list(nodes),
        where=format_nodes(nodes) if where is None else where,
        share=share[0] if share else None,
        basis=share[1] if share else "",
        files=list(shown),
    )


def find_at(
    code: str,
    place: onnx.NodeProto | str,
    why: str,
    severity: Severity | None = None,
    effect: Effect | None = None,
) -> FindingRow:
    """Create a finding of `check` at a node or a name; `severity` and `effect` override those of its code."""
    kind = read_kinds("graph")[code]
    return FindingRow(
        severity=severity or kind.severity,
        effect=effect or kind.effect,
        code=code,
        node=place if isinstance(place, str) else finding_label(place),
        why=why,
        fix=kind.edit,
    )


def finding_label(node: onnx.NodeProto) -> str:
    """Return the name of a node, or its operator and first output."""
    return str(node.name) or f"{node.op_type} (output {next(iter(node.output), '')!r})"
