"""Upload a deployed folder to the Hub."""

import glob
import json
from pathlib import Path

from qdqbench.quantize.deployment.write import TOLD, read_sums
from qdqbench.quantize.tasks.data.files import find_root_cause
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import SUMS


def push_folder(folder: Path, repository: str, *, private: bool = False, create_pr: bool = False) -> str:
    """Upload a folder that `write_deploy` wrote, and return the URL of its commit or pull request.

    huggingface_hub finds the token and the Hub (HF_TOKEN or its login, HF_ENDPOINT). Without `create_pr` the
    repository is created if needed. UserError: the run failed, there is no token, or the Hub refuses.
    """
    from huggingface_hub import HfApi, get_token

    if failed := json.loads((folder / TOLD).read_text(encoding="utf-8"))["failed"]:
        raise UserError(f"{folder} is not for use, so it is not pushed: {failed}")
    if (token := get_token()) is None:
        raise UserError("no token for the Hub; `hf auth login` stores one, HF_TOKEN sets one")
    api = HfApi()
    try:
        if not create_pr:
            api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.repo_info(repository).private:
            raise UserError(f"{repository} is there and public; make it private, or drop --private")
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload INT8 graphs by qdqbench",
            create_pr=create_pr,
            allow_patterns=[glob.escape(name) for name in (*read_sums(folder), SUMS)],
        )
    except UserError:
        raise
    except Exception as error:  # of httpx, of huggingface_hub, OSError, ValueError
        reason = find_root_cause(error).replace(token, "TOKEN")
        raise UserError(f"cannot push to {repository}: {reason}") from error
    return str(done.pr_url or done.commit_url)
