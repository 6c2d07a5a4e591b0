"""Training checkpoints: written whole or not at all, proven by hash, and bound to one run.

Accelerate writes and reads the state. Its own rotation would lose the best checkpoint, and it loads damage or
another run's state silently.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.schema import Strict, read

if TYPE_CHECKING:
    from accelerate import Accelerator

CHECKPOINT_FILE = "checkpoint.json"
WEIGHTS = "model.safetensors"
KEPT = 2  # the last, and the one before it in case the last is damaged; their best are kept as well


class _CheckpointManifest(Strict):
    schema_version: Literal[1] = 1
    identity: dict[str, Any]  # what the run is of, as JSON values
    best_step: int  # whose checkpoint is kept as well
    state: dict[str, Any]  # of the training loop
    files: dict[str, str]  # name -> sha256


def save_checkpoint(folder: Path, step: int, accelerator: "Accelerator", manifest: dict[str, Any]) -> None:
    """Write a checkpoint from all processes; the others go, but for the one before and the best of both.

    Args:
        accelerator: holds model, optimizer and scheduler.
        manifest: fields of the manifest, but for the files.

    Raises:
        UserError: it cannot be written.
    """
    final = get_checkpoint_folder(folder, step)
    temporary = folder / f".{final.name}.tmp"

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        hashes = {path.name: files.sha256(path) for path in sorted(temporary.iterdir())}
        written = _CheckpointManifest(**manifest, files=hashes)
        files.write_json(temporary / CHECKPOINT_FILE, written.model_dump(mode="json"))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        last = [path for path in _list(folder) if path.name <= final.name][:KEPT]  # later ones are damaged
        manifests = filter(None, map(_read_manifest, last))
        best = {get_checkpoint_folder(folder, manifest.best_step) for manifest in manifests}
        for other in {*_list(folder)} - {*last} - best:
            shutil.rmtree(other)

    main = accelerator.is_main_process
    _run_together(accelerator, folder, prepare if main else None)
    _run_together(accelerator, folder, lambda: accelerator.save_state(str(temporary)))
    _run_together(accelerator, folder, finish if main else None)


def _run_together(accelerator: "Accelerator", folder: Path, work: Callable[[], Any] | None) -> None:
    """Do the work of this process and wait for the others; all stop when one cannot write."""
    from accelerate.utils import gather_object

    problem = ""
    try:
        if work is not None:
            work()
    except Exception as error:  # OSError, and what torch and safetensors make of it
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    for text in filter(None, gather_object([problem])):
        raise UserError(
            f"checkpoints cannot be written into {folder} ({text}); make room or choose another --out"
        )


def get_checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def find_checkpoint(
    folder: Path, identity: dict[str, Any], notes: list[str]
) -> tuple[Path, dict[str, Any]] | None:
    """Find the last whole checkpoint of a run, if any: its folder and the state of the training loop.

    Args:
        identity: of the run that is to be resumed.
        notes: gets a line for each damaged checkpoint that is passed over.

    Raises:
        UserError: a checkpoint of another run (recipe, model, data, processes, arithmetic).
    """
    for path in _list(folder):
        manifest = _read_manifest(path)
        if manifest is not None:
            _require_same(path, manifest.identity, identity)
        damaged = _list_damaged(path)
        if manifest is not None and not damaged:
            best = get_checkpoint_folder(folder, manifest.best_step)
            damaged = [f"{best.name}/{name}" for name in _list_damaged(best)]  # whose weights the run returns
            if not damaged:
                return path, manifest.state
        notes.append(f"checkpoint {path.name} is damaged ({', '.join(damaged)}); it is passed over")
    if _list(folder):
        notes.append("no whole checkpoint was left; the training began again")
    return None


def load_weights(checkpoint: Path, model: Any) -> None:
    """Give a model the weights of a checkpoint, in place; UserError where it is gone or damaged."""
    from safetensors.torch import load_model

    if damaged := _list_damaged(checkpoint):
        raise UserError(
            f"{checkpoint} is damaged ({', '.join(damaged)}); run the same command again, which resumes from "
            "an older checkpoint"
        )
    load_model(model, checkpoint / WEIGHTS)


def _require_same(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    def short(value: Any) -> str:
        text = str(value)
        return text if len(text) <= 24 else f"{text[:12]}..."

    differing = [
        f"{key} (there {short(there.get(key))}, here {short(here.get(key))})"
        for key in {**there, **here}
        if there.get(key) != here.get(key)
    ]
    if differing:
        raise UserError(
            f"{folder} is a checkpoint of another run: it differs in {', '.join(differing)}; resume with "
            "what it was started with, or give another --out, or remove it to begin again"
        )


def _list(folder: Path) -> list[Path]:
    """Return the checkpoints, the last first."""
    return sorted(folder.glob("step-*"), reverse=True) if folder.is_dir() else []


def _read_manifest(folder: Path) -> _CheckpointManifest | None:
    try:
        return read(folder / CHECKPOINT_FILE, _CheckpointManifest, "checkpoint", "go on from another")
    except UserError:
        return None


def _list_damaged(folder: Path) -> list[str]:
    """Return the files of a checkpoint that are not as they were written."""
    manifest = _read_manifest(folder)
    if manifest is None:
        return [CHECKPOINT_FILE]
    return [
        name
        for name, digest in manifest.files.items()
        if Path(name).name != name or not (folder / name).is_file() or files.sha256(folder / name) != digest
    ]
