"""The identity of a model: its files, its commit on the hub, and why it cannot be loaded."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.models.pooling import FIELD, MODULES, read_model_json, read_sentence_folder
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import read_json, sha256
from qdqbench.quantize.utils.system.hub import HubError, commit_of
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit of a hub model; None for a folder."""
    if not Path(name).is_dir():
        return commit_of(name, "model", revision)
    if revision is not None:
        raise UserError(f"model {name} is a folder, which has no revision {revision!r}; drop --revision")
    return None


def read_config(name: str, commit: str | None, inside: str = "") -> Any:
    """Read the configuration of a model of any type that transformers has; `inside` is a folder of it."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, __version__

    try:
        return AutoConfig.from_pretrained(name, revision=commit, trust_remote_code=False, subfolder=inside)
    except ValueError as error:  # of a hundred words
        given, _ = PreTrainedConfig.get_config_dict(name, revision=commit, subfolder=inside)
        if not given or given.get("model_type") in CONFIG_MAPPING:
            raise
        raise UserError(
            f"model {name} is a {given.get('model_type')!r} (config.json, key model_type), which "
            f"transformers {__version__} does not know, and code of a model's own is never run; give a model "
            "of another type, or update transformers"
        ) from error


def describe_model(name: str, model: "PreTrainedModel", revision: str | None = None) -> dict[str, Any]:
    """Return what results say of a loaded model; its hash tells a changed model from the old one."""
    config = model.config
    return {
        "name": name,
        "sha256": model_fingerprint(name, revision),
        "architecture": type(model).__name__,
        "num_labels": int(config.num_labels or 0),
        "problem_type": config.problem_type or ("regression" if config.num_labels == 1 else None),
        "label_names": [str(name) for _, name in sorted((config.id2label or {}).items())],
        "revision": model_commit(name, revision),
    }


def model_fingerprint(name: str, revision: str | None = None) -> str:
    """Hash the files that define a model (config, weights, tokenizer); id and commit on the hub."""
    folder = Path(name)
    digest = hashlib.sha256()
    with explain_load_errors(name):
        commit = model_commit(name, revision)
        listed = read_json(folder / MODULES) if (folder / MODULES).is_file() else []
        parts = {"", *(str(module.get("path", "")) for module in listed)}  # of sentence-transformers
    if commit is not None:
        return hashlib.sha256(f"{name}@{commit}".encode()).hexdigest()
    inside = (folder / part for part in parts if (folder / part).is_dir())
    for file in sorted(file for place in inside for file in place.iterdir()):
        if file.suffix in (".json", ".safetensors", ".txt"):
            digest.update(f"{file.relative_to(folder)} {sha256(file)}\n".encode())
    return digest.hexdigest()


def has_pooling(name: str, revision: str | None = None) -> bool:
    """Return whether a model says how its tokens become an embedding; False if it cannot be loaded."""
    try:
        with quiet("transformers"), explain_load_errors(name):
            commit = model_commit(name, revision)
            listed = read_model_json(name, MODULES, commit) is not None
            return listed or FIELD in (read_model_json(name, "config.json", commit) or {})
    except UserError:  # loading says why
        return False


def embedding_notes(name: str, revision: str | None, max_length: int) -> list[str]:
    """Return notes on an embedding model that is exported for texts of `max_length` tokens."""
    with quiet("transformers"), explain_load_errors(name):
        folder = read_sentence_folder(name, model_commit(name, revision))
    notes = [*folder.notes] if folder else []
    if folder and folder.longest is not None and folder.longest < max_length:
        notes.append(
            f"texts are cut at {max_length} tokens (export.max_length); sentence-transformers would cut "
            f"those of this model at {folder.longest} (max_seq_length)"
        )
    return notes


@contextmanager
def explain_load_errors(name: str, what: str = "model") -> Iterator[None]:
    """Turn the many ways in which a load fails into a UserError of one sentence."""
    where = "the folder" if Path(name).is_dir() else "no such folder here, and as a hub id"
    try:
        yield
    except HubError as error:
        raise UserError(f"cannot load {what} {name} ({where}): {error}") from error
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot load {what} {name} ({where}): {type(error).__name__}: {reason}") from error
