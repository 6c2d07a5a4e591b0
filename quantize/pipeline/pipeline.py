"""The order of the stages, and which of them can be skipped because nothing changed."""

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qdqbench.quantize.pipeline.ownership import CONTENTS
from qdqbench.quantize.pipeline.session import CONFIG, RunConfig, Session
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.schema import Strict, field, read
from qdqbench.quantize.utils.system.environment import get_code_identity
from qdqbench.quantize.utils.system.process import freeze_gc, interruption, measure_cost

STAGES_FILE = "stages.json"
# files that a stage can have; what else the manifest lists may be the user's own
MADE = re.compile(
    r"(embedded|engine|gpu|logits|qat|reconstruction)/.+|model\.\w+\.onnx|(build|calibration|check|engine|layer_errors|layers|"
    r"onnxruntime|parity|rewrites|verify)\.json"
)


@dataclass(frozen=True)
class Stage:
    name: str
    run: Callable[[Session], list[Path]]
    needs: tuple[str, ...]  # stages whose outputs it reads
    inputs: Callable[[Session], Any]  # everything else that its outputs depend on, as JSON values
    recorded: Callable[[Session], None] = lambda session: None  # called once its outputs are in the manifest
    holds: Callable[[Session], bool] = lambda session: True  # whether a whole outcome is still true here


class Timing(Strict):
    """Cost of one stage of the run."""

    wall_s: float = field("Wall time in seconds.")
    cpu_s: float | None = field("CPU time of all threads in seconds; null if not measured.", default=None)
    peak_rss_bytes: int = field("Peak memory of the whole process during the stage, in bytes.")
    reused: bool = field("True if nothing had changed and the files of an earlier run were kept.")


class FinishedStage(Strict):
    key: str
    outputs: dict[str, str]  # path inside the run directory -> sha256
    notes: list[str]
    warnings: list[str]
    made_with: dict[str, Any]
    model_sha256: str | None = None  # of the model that it read; None: an older version made it
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int

    def timing(self, *, reused: bool) -> Timing:
        return Timing(**self.model_dump(include={"wall_s", "cpu_s", "peak_rss_bytes"}), reused=reused)


class _StageManifest(Strict):
    schema_version: Literal[1] = 1
    stages: dict[str, FinishedStage] = {}


def open_run(config: RunConfig, folder: Path) -> Session:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give --out a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).is_file():
        raise UserError(f"{folder} holds other files than a run; give --out an empty or new folder")
    files.write_json(folder / CONFIG, config.model_dump(mode="json"))
    return Session(config, folder)


def run_stages(
    session: Session,
    stages: Iterable[Stage],
    announce: Callable[[str, bool], None] = lambda name, reused: None,
) -> dict[str, Timing]:
    """Run stages, needs first, and return their costs; one whose key and files are as it left them is reused.

    One that was skipped for want of a device or library is reused only while that is so. `announce` is called
    with a stage's name, and whether it is reused, before it runs.
    """
    timings: dict[str, Timing] = {}
    freeze_gc()
    manifest = _read(session.folder / STAGES_FILE)
    try:
        for stage in stages:
            interruption.raise_if_pending()
            key, done = _key(session, stage, manifest), manifest.stages.get(stage.name)
            reused = done is not None and done.key == key and _intact(session.folder, done)
            reused = reused and stage.holds(session)
            announce(stage.name, reused)
            if done is None or not reused:
                manifest.stages.pop(stage.name, None)
                done = manifest.stages[stage.name] = _run_stage(session, stage, key, done)
                files.write_json(session.folder / STAGES_FILE, manifest.model_dump(mode="json"))
            session.notes = [*dict.fromkeys([*session.notes, *done.notes])]
            session.warnings = [*dict.fromkeys([*session.warnings, *done.warnings])]
            timings[stage.name] = done.timing(reused=reused)
            stage.recorded(session)
            interruption.raise_if_pending()
    finally:
        files.restore_json(session.folder / CONFIG, session.config.model_dump(mode="json"))
    return timings


def _run_stage(session: Session, stage: Stage, key: str, before: FinishedStage | None) -> FinishedStage:
    noted, warned = len(session.notes), len(session.warnings)
    with measure_cost() as cost:
        outputs = stage.run(session)
    hashes = {str(path.relative_to(session.folder)): files.sha256(path) for path in outputs}
    _remove_stale(session.folder, before, hashes)
    return FinishedStage(
        key=key,
        outputs=hashes,
        notes=session.notes[noted:],
        warnings=session.warnings[warned:],
        made_with=get_code_identity(),
        model_sha256=session.model_sha256,
        **vars(cost),
    )


def read_finished(folder: Path) -> dict[str, FinishedStage]:
    return _read(folder / STAGES_FILE).stages


def require_recorded(session: Session, graph: Path) -> None:
    """Hold files of stages and the model to the hashes of the time when `graph` was made and judged.

    Whoever hands a run on calls it first; a `UserError` names what changed. What is gone is not looked at.
    """
    folder, finished = session.folder, read_finished(session.folder)
    recorded = {name: digest for stage in finished.values() for name, digest in stage.outputs.items()}
    again = f"`qdqbench report {shlex.quote(str(folder))}`"
    made = str(graph.relative_to(folder))
    if made not in recorded:
        raise UserError(f"{folder / STAGES_FILE} has no record of {made}; {again} makes both again")
    there = [name for name in recorded if (folder / name).is_file()]
    with ThreadPoolExecutor() as pool:  # a server waits for it
        digests = pool.map(files.sha256, (folder / name for name in there))
        for name, digest in zip(there, digests, strict=True):
            if digest != recorded[name]:
                raise UserError(f"{folder / name} changed since the run made it; {again} makes it again")
    known = [stage.model_sha256 for stage in finished.values() if made in stage.outputs]
    with suppress(UserError, KeyError, TypeError):  # not evaluated yet
        known.append(files.read_json(folder / CONTENTS["run"][1])["model"]["sha256"])
    if {session.model_sha256} != {*known} - {None}:
        raise UserError(
            f"model {session.model_name} (weights, configuration or tokenizer) is not the one that the run "
            f"was made of; put that back, or {again} runs again what changed"
        )


def explain_stale(folder: Path, names: Iterable[str]) -> str:
    known, here = read_finished(folder), get_code_identity()
    stale = [name for name in names if name in known and known[name].made_with != here]
    if not stale:
        return ""
    was = known[stale[0]].made_with.get("versions", {})
    moved = [
        f"{name} {was[name]} (now {now})"
        for name, now in here["versions"].items()
        if was.get(name, now) != now
    ]
    other = ", ".join(moved) or "other code of qdqbench"
    return f"{', '.join(stale)} made again: what is there was made with {other}"


def remove_other_stages(folder: Path, known: Iterable[str]) -> None:
    path = folder / STAGES_FILE
    manifest = _read(path)
    for name in set(manifest.stages) - set(known):
        _remove_stale(folder, manifest.stages.pop(name), {})
        files.write_json(path, manifest.model_dump(mode="json"))


def select_stages(stages: dict[str, Stage], targets: Iterable[str]) -> list[Stage]:
    wanted = set(targets)
    for name in reversed(stages):
        if name in wanted:
            wanted.update(stages[name].needs)
    return [stage for name, stage in stages.items() if name in wanted]


def _key(session: Session, stage: Stage, manifest: _StageManifest) -> str:
    needs = {name: manifest.stages[name].outputs for name in stage.needs if name in manifest.stages}
    known = {"stage": stage.name, **get_code_identity(), "needs": needs, "inputs": stage.inputs(session)}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _intact(folder: Path, done: FinishedStage) -> bool:
    return all(
        (folder / n).is_file() and files.sha256(folder / n) == digest for n, digest in done.outputs.items()
    )


def _remove_stale(folder: Path, before: FinishedStage | None, now: dict[str, str]) -> None:
    """Remove files of an earlier recipe in this folder, which would be taken for this one's."""
    for name in set(before.outputs if before else ()) - set(now):
        inside = (folder / name).resolve().is_relative_to(folder.resolve())  # whatever the manifest says
        if inside and MADE.fullmatch(name):
            (folder / name).unlink(missing_ok=True)


def _read(path: Path) -> _StageManifest:
    try:
        return read(path, _StageManifest, "list of stages", "run them again")
    except UserError:
        return _StageManifest()
