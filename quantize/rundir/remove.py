"""What qdqbench writes into a folder, by the kind of folder: that, and nothing else, is removed again."""

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.machine.lock import HOLDER, LOCK

MARK = ".qdqbench.json"


@dataclass(frozen=True)
class Kind:
    """A kind of folder."""

    what: str  # it holds, in words
    result: str  # file of one that came to its end
    made: tuple[str, ...]  # patterns of paths in it; a * goes over slashes


_BENCH = ("bench.json", "bench.md", "bench.html", "bench/*", "work/*", "also/*")
_RUN = (
    "run.json",
    "recipe.yaml",
    "stages.json",
    "results.json",
    "report.*",
    "calibration.json",
    "check.json",
    "parity.json",
    "build.json",
    "verify.json",
    "engine.json",
    "layers.json",
    "model.*.onnx",
    "logits/*.npz",
    "engine/model.*",
    "engine/*.cache",
    "gpu/*",
    "qat/*",
    "plan/*",
    "trtexec/*",
    "changed.csv",
    "embedded/*",
    *_BENCH,
)
_SENSITIVITY = ("sensitivity.*", "recipe.yaml", "embedded/*")
_METHODS = ("methods.*", "recipe.yaml", "embedded/*")
_TRAINED = ("finetune.*", "seed-*", "embedded/*")
KINDS = {
    "run": Kind("run", "results.json", _RUN),
    "sensitivity": Kind("sensitivity run", "sensitivity.json", _SENSITIVITY),
    "methods": Kind("table of methods", "methods.json", _METHODS),
    "search": Kind("search", "search.json", ("search.*", "study.db*", "recipe.yaml", "work/*")),
    "auto": Kind(
        "ladder",
        "auto.json",
        (
            *("auto.*", "best.yaml", "trials.*", "embedded/*", "timing-*", "*/run.yaml"),
            *(f"*/run/{name}" for name in _RUN),
            *(f"methods/{name}" for name in _METHODS),
            *(f"islands/{name}" for name in _SENSITIVITY),
            "search/*",
        ),
    ),
    "finetune": Kind("fine-tuning", "finetune.json", _TRAINED),
    "study": Kind("study", "study.json", ("study.*", *_TRAINED)),
    "bench": Kind("bench", "bench.json", _BENCH),
    "compare": Kind(
        "comparison",
        "compare.json",
        ("compare.*", *(f"{name}.csv" for name in ("runs", "pairs", "samples", "layers"))),
    ),
}
STAGES = "stages.json"
HAND_OFF, SUMS = "deploy", "SHA256SUMS"
_EVERYWHERE = (MARK, LOCK, HOLDER, "*.tmp/*")  # the last: of a process that was killed while it wrote
ASKED = {MARK, "run.json", "recipe.yaml", LOCK, HOLDER}  # they hold what was asked for, and no result


@dataclass
class Removed:
    """What was removed, and what was not."""

    count: int = 0
    size: int = 0  # bytes
    kept: tuple[str, ...] = ()  # which qdqbench did not make

    def __str__(self) -> str:
        kept = f"; kept {name_list(self.kept, 3)}, not made by qdqbench" if self.kept else ""
        return f"{self.count} files, {self.size / 1e6:.1f} MB{kept}"


def remove_made(folder: Path, kind: str) -> Removed:
    """Remove what qdqbench made in a folder of some kind, with the folders that get empty by it.

    What is of no pattern of `KINDS` stays, and no link is followed. Folder, lock and mark stay too.
    """
    patterns = (*KINDS[kind].made, *_EVERYWHERE, *_listed(folder / HAND_OFF), *_stage_outputs(folder))
    found, kept = Removed(), []
    for place, folders, names in os.walk(folder, topdown=False):
        before = found.count
        for name in [*names, *(each for each in folders if (Path(place) / each).is_symlink())]:
            path = Path(place) / name
            inside = path.relative_to(folder).as_posix()
            if inside in (MARK, LOCK, HOLDER):
                continue
            if not any(fnmatchcase(inside, pattern) for pattern in patterns):
                kept.append(inside)
                continue
            found.count, found.size = found.count + 1, found.size + path.lstat().st_size
            path.unlink()
        empty = not any(Path(place).iterdir())
        if Path(place) != folder and empty and (found.count > before or folders):
            Path(place).rmdir()
    found.kept = tuple(sorted(kept))
    return found


def _stage_outputs(folder: Path) -> list[str]:
    """What the stages of the runs in a folder say that they wrote."""
    found = []
    for path in folder.rglob(STAGES):
        inside = path.parent.relative_to(folder)
        try:
            stages = files.read_json(path)["stages"].values()
            names = [name for stage in stages for name in stage["outputs"]]
        except (UserError, AttributeError, KeyError, TypeError):
            continue  # what is not readable names nothing
        found += [_escaped((inside / name).as_posix()) for name in names]
    return found


def _listed(folder: Path) -> list[str]:
    """Files of a hand-off that are as they were written, by its checksums: an edited script is not ours."""
    if not (folder / SUMS).is_file():
        return []
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    parts = [line.partition("  ") for line in lines]
    whole = [name for digest, _, name in parts if _is(folder / name, digest)]
    return [f"{folder.name}/{_escaped(name)}" for name in (*whole, SUMS)]


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and files.sha256(path) == digest


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def remove_asked(folder: Path) -> None:
    """Remove what a command that came to nothing wrote of what it was asked for, if nothing else is there."""
    found = [path for path in folder.rglob("*") if not path.is_dir()]
    if all(path.parent == folder and path.name in ASKED for path in found):
        for path in found:
            if path.name not in (LOCK, HOLDER):
                path.unlink()
        for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
            path.rmdir()
