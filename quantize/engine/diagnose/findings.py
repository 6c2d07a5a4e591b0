"""What `diagnose` says: findings with their effect, and the files that they come from."""

from typing import get_args

from qdqbench.quantize.utils.frames import Tabular
from qdqbench.quantize.utils.results import Effect
from qdqbench.quantize.utils.schema import Strict

WORST_FIRST: tuple[Effect, ...] = get_args(Effect)
EFFECTS: dict[Effect, str] = {
    "refused": "no engine is built",
    "wrong": "answers can be wrong",
    "not INT8": "no gain from INT8",
    "not portable": "ONNX Runtime refuses the file",
    "slow": "time",
    "note": "worth knowing",
}


class Finding(Strict):
    """One thing that is wrong, for all the nodes that have it."""

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
    def severity(self) -> str:
        """As in `check`: an error breaks or silently changes the engine."""
        return "warning" if self.effect in ("slow", "note") else "error"


class SourceRow(Strict):
    """One file that was read."""

    name: str
    kind: str
    what: str  # in a few words


class Diagnosis(Tabular):
    """Every finding of the files of one build, the worst first."""

    files: list[SourceRow]
    findings: list[Finding]
    ranked_by: str  # how the order came about
    joined: list[str] = []  # which files were read together, and by what

    def rows(self) -> list[Finding]:
        """One a finding."""
        return self.findings

    @property
    def errors(self) -> list[Finding]:
        """Findings for which the exit status is 2."""
        return [row for row in self.findings if row.severity == "error"]
