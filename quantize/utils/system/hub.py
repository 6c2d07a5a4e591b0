"""The commit of a hub repository, fixed so that a newer one is never taken for the measured one."""

import functools
import re
from pathlib import Path
from typing import Literal

from qdqbench.quantize.utils.errors import UserError

RepoKind = Literal["model", "dataset"]
TIMEOUT_S = 20.0


class HubError(UserError):
    """A repository or its commit cannot be found; the caller says what it is for."""


@functools.lru_cache
def commit_of(repository: str, kind: RepoKind, revision: str | None = None) -> str:
    """Return the commit of OWNER/NAME, at a revision or the default one; `HubError` where none is known."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    try:
        commit = HfApi().repo_info(repository, repo_type=kind, revision=revision, timeout=TIMEOUT_S).sha
    except HFValidationError as error:  # of many words, which speak of arguments of a library
        raise HubError(f"an id of a {kind} there is NAME or OWNER/NAME") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise HubError(f"no such {kind} on the hub: {_reason(error)}") from error
    except Exception as error:  # without a connection: OSError, ValueError, or a class of its own
        commit = _cached(repository, kind, revision)
        if commit is None:
            raise HubError(
                f"the hub cannot be reached ({_reason(error)}), and its cache names no commit; "
                "give a folder, a commit's 40 digits as revision, or the connection"
            ) from error
    assert commit is not None
    return commit


def _cached(repository: str, kind: RepoKind, revision: str | None) -> str | None:
    """Return the commit by the refs in the hub's cache, or the only one that is there."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type=kind)
    ref = folder / "refs" / (revision or "main")
    if ref.is_file():
        return ref.read_text(encoding="ascii").strip()
    there = [path.name for path in (folder / "snapshots").glob("*")]
    return there[0] if len(there) == 1 and revision is None else None


def _reason(error: Exception) -> str:
    if type(error).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set"
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")
