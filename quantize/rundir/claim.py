"""What a folder is of: written into it, so that no run is lost under another one, and its default name.

A folder belongs to a kind of command, the name of a recipe, a model and a task. All else may change from call
to call: a recipe that was edited, a model that was trained on in its place, other data, seeds and limits are
the same run, whose stale stages are made again. A model is the same at the same place (of the hub: id and
revision), or anywhere with the same files.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.strict import Strict, read
from qdqbench.quantize.encoders.identity import model_fingerprint
from qdqbench.quantize.machine.lock import HOLDER, LOCK, held
from qdqbench.quantize.machine.process import leads
from qdqbench.quantize.rundir.remove import KINDS, MARK, remove_asked, remove_made
from qdqbench.quantize.rundir.session import CONFIG, RunConfig, Session, read_config

RUNS = Path("runs")
LONGEST_NAME = 64  # characters of a model in the name of a folder
PLAIN = re.compile(r"model|checkpoint.*|seed-\d+")  # last parts of a path that name no model


class Purpose(Strict):
    """What a folder is of."""

    schema_version: Literal[1] = 1
    kind: str  # of `KINDS`
    recipe: str | None = None  # its name; None: there are several, or none
    model: str | None = None  # absolute path, or hub id with @REVISION; None: the embedded default
    model_sha256: str | None = None
    task: str | None = None

    def same(self, other: "Purpose") -> bool:
        """Whether a command with one purpose may go on in a folder of the other."""
        one, two = ((each.kind, each.recipe, each.task) for each in (self, other))
        return one == two and not self._other_model(other)

    def _other_model(self, other: "Purpose") -> bool:
        alike = self.model_sha256 is not None and self.model_sha256 == other.model_sha256
        return self.model != other.model and not alike

    def words(self, but: "Purpose | None" = None) -> str:
        """The recipe, model and task; of them only what is not as in `but`."""
        if self.kind == "compare":
            return "finished runs"
        parts = []
        if self.recipe and (but is None or self.recipe != but.recipe):
            parts.append(f"recipe {self.recipe}")
        if but is None or self._other_model(but):
            parts.append(f"model {self.model}" if self.model else "the embedded default")
        if self.task and self.task != "embedded" and (but is None or self.task != but.task):
            parts.append(f"task {self.task}")
        return ", ".join(parts)


def purpose_of(kind: str, session: Session) -> Purpose:
    """What a folder of this session is of.

    Raises:
        UserError: its model cannot be found.
    """
    asked = session.config
    sha256 = session.model_sha256 if asked.model else None
    recipe = None if kind == "auto" else asked.recipe.name
    return Purpose(
        kind=kind,
        recipe=recipe,
        model=place_of(asked.model, asked.revision),
        model_sha256=sha256,
        task=asked.task.name,
    )


def place_of(model: str | None, revision: str | None = None) -> str | None:
    """Where a model is, wherever one asks: an absolute path, or a hub id with its revision."""
    if model is None:
        return None
    path = Path(model)
    return str(path.resolve()) if path.exists() else model + (f"@{revision}" if revision else "")


def trained_purpose(kind: str, model: str | None, revision: str | None, task: str) -> Purpose:
    """What a folder of trainings is of.

    Raises:
        UserError: the model cannot be found.
    """
    sha256 = None if model is None else model_fingerprint(model, revision)
    return Purpose(kind=kind, model=place_of(model, revision), model_sha256=sha256, task=task)


def default_folder(kind: str, model: str | None, *names: str) -> Path:
    """Where a command writes without --out: runs/[KIND-]MODEL-..., the embedded default without a model."""
    parts = ["" if kind == "run" else kind, "" if model is None else model_name(model), *names]
    return RUNS / "-".join(filter(None, parts))


def run_folder(kind: str, config: RunConfig, out: str | Path | None) -> Path:
    """The folder that was asked for, else runs/[KIND-]MODEL-RECIPE-TASK."""
    if out is not None:
        return Path(out)
    return default_folder(kind, config.model, config.recipe.name, config.task.name)


def model_name(model: str) -> str:
    """A model's name, from the last part of its path or hub id that is one, as a part of a file name."""
    parts = [part for part in (Path(model).resolve() if Path(model).exists() else Path(model)).parts if part]
    kept: list[str] = []
    for part in reversed(parts):
        if part != "model" or len(parts) == 1:
            kept.insert(0, part)
        if not PLAIN.fullmatch(part):
            break
    name = re.sub(r"[^\w.-]+", "-", "-".join(kept)).strip("-.")
    return name[-LONGEST_NAME:].lstrip("-.") or "model"


@contextmanager
def claimed(
    folder: Path,
    purpose: Purpose,
    *,
    replace: bool = False,
    ready: Callable[[], object] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[None]:
    """A folder for one purpose, which this process holds; one that comes to nothing is left as it was.

    Args:
        replace: what an earlier command made there is removed, whatever it was of.
        ready: raises where the command cannot be done; before anything is written or removed.
        say: called with what was removed.

    Raises:
        UserError: the folder is of something else, holds other files, is in use or cannot be written; or as
            `ready` does.
    """
    if not leads():
        yield
        return
    _found(folder, purpose, replace)  # before a lock is put into a folder that is not ours
    files.require_writable(folder)
    with held(folder):
        there = _found(folder, purpose, replace)
        ready()  # whatever is there stays as it is where this raises
        if there is not None and replace:
            ended = _ended(folder, there)
            say(f"{folder}: removed {ended} of {there.words()}: {remove_made(folder, there.kind)}")
        try:
            files.write_json(folder / MARK, purpose.model_dump(mode="json"))
            yield
        finally:
            if there is None:
                remove_asked(folder)


@contextmanager
def taken_up(folder: str | Path) -> Iterator[Session]:
    """The session of a run that was started, in a folder that this process holds.

    Raises:
        UserError: no run directory, or another process is at it.
    """
    place = Path(folder)
    read_config(place)  # before a lock is put into a folder that is not ours
    with held(place):
        yield Session(read_config(place), place)


def _found(folder: Path, purpose: Purpose, replace: bool) -> Purpose | None:
    """What a folder is of; None where nothing is there.

    Raises:
        UserError: it is not for this purpose.
    """
    what = KINDS[purpose.kind].what
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give --out a folder")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not names - {LOCK, HOLDER}:
        return None
    there = _purpose_in(folder)
    if there is None:
        raise UserError(f"{folder} holds other files than a {what}; give --out an empty or new folder")
    if not replace and not there.same(purpose):
        wanted = purpose.words(there)
        if purpose.kind != there.kind:
            wanted = f"a {what} of {purpose.words()}"
        raise UserError(
            f"{folder} holds {_ended(folder, there)} of {there.words()}, and asked for is {wanted}; give "
            "another --out, or --replace to remove that and start anew"
        )
    return there


def _purpose_in(folder: Path) -> Purpose | None:
    """What a folder says that it is of; a run without a mark, such as a ladder's step, by its settings."""
    if (folder / MARK).is_file():
        return read(folder / MARK, Purpose, "mark of a folder", "give another --out")
    if not (folder / CONFIG).is_file():
        return None
    asked = read_config(folder)
    try:
        return purpose_of("run", Session(asked, folder))
    except UserError:  # its model is gone
        where = place_of(asked.model, asked.revision)
        return Purpose(kind="run", recipe=asked.recipe.name, model=where, task=asked.task.name)


def _ended(folder: Path, there: Purpose) -> str:
    kind = KINDS[there.kind]
    return f"a{' finished' if (folder / kind.result).is_file() else 'n unfinished'} {kind.what}"
