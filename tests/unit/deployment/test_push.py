"""A folder goes to the Hub by its real client; a token goes nowhere else."""

import json
import traceback

import pytest

from qdqbench.quantize.deployment.write import push_folder
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import SUMS

from ...support.hub_stub import TOKEN

MODEL = b"weights" * 1000


@pytest.fixture
def folder(tmp_path):
    for name, data in (
        ("README.md", b"---\nlicense: mit\n---\n"),
        ("model.onnx", MODEL),
        ("a/b.json", b"{}"),
        ("a/[!b].json", b"{}"),
    ):
        path = tmp_path / "deploy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "deploy" / "model.json").write_text(json.dumps({"failed": ""}))
    written = [path.relative_to(tmp_path / "deploy") for path in (tmp_path / "deploy").rglob("*.*")]
    (tmp_path / "deploy" / SUMS).write_text("".join(f"0  {name}\n" for name in written))
    for name in ("__pycache__/model.pyc", "a/__pycache__/b.pyc", "a/__pycache__/diary.txt", "mine.json"):
        path = tmp_path / "deploy" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"not of it")
    return tmp_path / "deploy"


def test_all_files_and_nothing_else_arrive(folder, hub_server):
    before = sorted(folder.rglob("*"))
    url = push_folder(folder, "me/int8")
    assert url == f"{hub_server.url}/me/int8/commit/{'0' * 40}"
    assert {*hub_server.files} == {"README.md", "model.onnx", "a/b.json", "a/[!b].json", "model.json", SUMS}
    assert hub_server.files["model.onnx"] == MODEL
    assert not hub_server.private
    assert sorted(folder.rglob("*")) == before
    assert TOKEN.encode() not in b"".join(hub_server.files.values())


def test_a_private_repository(folder, hub_server):
    push_folder(folder, "me/int8", private=True)
    assert hub_server.private
    assert hub_server.files


def test_nothing_goes_to_a_public_one_where_private_was_asked_for(folder, hub_server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *arguments, **options: None)
    with pytest.raises(UserError, match="me/int8 is there and public"):
        push_folder(folder, "me/int8", private=True)
    assert not hub_server.files


def test_a_pull_request_creates_no_repository(folder, hub_server):
    assert push_folder(folder, "me/int8", create_pr=True) == f"{hub_server.url}/me/int8/discussions/1"
    assert "POST /api/repos/create" not in hub_server.asked


def test_what_is_refused_names_no_token(folder, hub_server, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", wrong := f"{TOKEN}wrong")
    with pytest.raises(UserError, match=r"cannot push to me/int8: .*401") as caught:
        push_folder(folder, "me/int8")
    told = "".join(traceback.format_exception(caught.value)) + "".join(capfd.readouterr())
    assert wrong not in told
    with pytest.raises(UserError, match="cannot push to not a name"):
        push_folder(folder, "not a name")


def test_neither_without_a_token_nor_of_a_failed_run(folder, hub_server, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="no token for the Hub; `hf auth login` stores one"):
        push_folder(folder, "me/int8")
    (folder / "model.json").write_text(json.dumps({"failed": "the drop is 0.2"}))
    with pytest.raises(UserError, match=r"not for use, so it is not pushed: the drop is 0\.2"):
        push_folder(folder, "me/int8")
    assert not hub_server.asked
