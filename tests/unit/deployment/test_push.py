"""A folder goes to the Hub by its real client; a token goes nowhere else."""

import json
import traceback

import pytest
from huggingface_hub import constants

from qdqbench.quantize.deployment.push import push_folder
from qdqbench.quantize.utils.errors import UserError

from ...support.hub_stub import served_hub

# huggingface_hub's own call of httpx, on its way without Xet
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_" + "s3cret" * 6
MODEL = b"weights" * 1000


@pytest.fixture
def folder(tmp_path):
    for name, data in (
        ("README.md", b"---\nlicense: mit\n---\n"),
        ("model.onnx", MODEL),
        ("a/b.json", b"{}"),
    ):
        path = tmp_path / "deploy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "deploy" / "model.json").write_text(json.dumps({"failed": ""}))
    (tmp_path / "deploy" / "__pycache__").mkdir()
    (tmp_path / "deploy" / "__pycache__" / "model.pyc").write_bytes(b"of Python")
    return tmp_path / "deploy"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with served_hub(TOKEN) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def test_all_files_and_nothing_else_arrive(folder, hub):
    before = sorted(folder.rglob("*"))
    url = push_folder(folder, "me/int8")
    assert url == f"{hub.url}/me/int8/commit/{'0' * 40}"
    assert {*hub.files} == {"README.md", "model.onnx", "a/b.json", "model.json"}
    assert hub.files["model.onnx"] == MODEL
    assert not hub.private
    assert sorted(folder.rglob("*")) == before
    assert TOKEN.encode() not in b"".join(hub.files.values())


def test_a_private_repository(folder, hub):
    push_folder(folder, "me/int8", private=True)
    assert hub.private
    assert hub.files


def test_nothing_goes_to_a_public_one_where_private_was_asked_for(folder, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *arguments, **options: None)
    with pytest.raises(UserError, match="me/int8 is there and public"):
        push_folder(folder, "me/int8", private=True)
    assert not hub.files


def test_a_pull_request_creates_no_repository(folder, hub):
    assert push_folder(folder, "me/int8", create_pr=True) == f"{hub.url}/me/int8/discussions/1"
    assert "POST /api/repos/create" not in hub.asked


def test_what_is_refused_names_no_token(folder, hub, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", wrong := f"{TOKEN}wrong")
    with pytest.raises(UserError, match=r"cannot push to me/int8: .*401") as caught:
        push_folder(folder, "me/int8")
    told = "".join(traceback.format_exception(caught.value)) + "".join(capfd.readouterr())
    assert wrong not in told
    with pytest.raises(UserError, match="cannot push to not a name"):
        push_folder(folder, "not a name")


def test_neither_without_a_token_nor_of_a_failed_run(folder, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="no token for the Hub; `hf auth login` stores one"):
        push_folder(folder, "me/int8")
    (folder / "model.json").write_text(json.dumps({"failed": "the drop is 0.2"}))
    with pytest.raises(UserError, match=r"not for use, so it is not pushed: the drop is 0\.2"):
        push_folder(folder, "me/int8")
    assert not hub.asked
