"""The commit of a hub repository: from the hub, from its cache, or one sentence."""

from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError

from qdqbench.quantize.models import identity
from qdqbench.quantize.models.load import load_config, load_model, load_tokenizer
from qdqbench.quantize.tasks.data.splits import source_commit, source_fingerprint
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.hub import HubError, commit_of

A, B = "a" * 40, "b" * 40


class FakeHub:
    """What is on the hub: (kind, repository, revision) -> commit."""

    def __init__(self):
        self.commits = {}
        self.asked = 0
        self.offline = False

    def repo_info(self, repository, *, repo_type, revision, timeout):
        self.asked += 1
        if self.offline:
            raise ConnectionError("no route\nto the hub")
        try:
            return SimpleNamespace(sha=self.commits[repo_type, repository, revision])
        except KeyError:
            nothing = SimpleNamespace(headers={}, request=None)
            raise RepositoryNotFoundError("404: not found", response=nothing) from None


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    fake = FakeHub()
    monkeypatch.setattr(HfApi, "repo_info", lambda _, *a, **k: fake.repo_info(*a, **k))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    commit_of.cache_clear()
    return fake


def cache(tmp_path, folder, *commits, **refs):
    """A cache folder in the hub's layout."""
    for commit in commits:
        (tmp_path / "cache" / folder / "snapshots" / commit).mkdir(parents=True)
    for name, commit in refs.items():
        path = tmp_path / "cache" / folder / "refs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)


def test_the_hub_says_which_commit_once_in_a_process(hub):
    hub.commits = {("model", "o/m", None): A, ("model", "o/m", "v1"): B}
    assert commit_of("o/m", "model") == A
    assert commit_of("o/m", "model", "v1") == B
    hub.commits["model", "o/m", None] = B
    assert commit_of("o/m", "model") == A
    assert commit_of("o/m", "model", "c" * 40) == "c" * 40  # a commit needs no hub
    assert hub.asked == 2


def test_without_a_connection_the_cache_tells(hub, tmp_path):
    hub.offline = True
    cache(tmp_path, "models--o--m", A, B, main=B, v1=A)
    cache(tmp_path, "datasets--o--d", A)
    assert commit_of("o/m", "model") == B
    assert commit_of("o/m", "model", "v1") == A
    assert commit_of("o/d", "dataset") == A  # the only one
    with pytest.raises(HubError, match=r"cannot be reached \(ConnectionError: no route to the hub\)"):
        commit_of("o/m", "model", "v2")
    cache(tmp_path, "models--o--n", A, B)
    with pytest.raises(HubError, match="names no commit"):
        commit_of("o/n", "model")


def test_a_changed_model_is_another_model(hub, tmp_path):
    hub.commits = {("model", "o/m", None): A}
    before = identity.model_fingerprint("o/m")
    assert identity.model_fingerprint("o/m") == before
    commit_of.cache_clear()
    hub.commits = {("model", "o/m", None): B, ("model", "o/m", "v1"): A}
    assert identity.model_fingerprint("o/m") != before
    assert identity.model_fingerprint("o/m", "v1") == before
    assert identity.model_commit("o/m") == B


def test_what_is_loaded_is_the_commit(hub, monkeypatch):
    import transformers

    seen = []

    def asked(name, *, revision, **_):
        seen.append((name, revision))
        raise OSError("not here")

    hub.commits = {("model", "o/m", "v1"): B}
    monkeypatch.setattr(identity, "find_model_file", lambda *_: None)  # which asks the hub itself
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", asked)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", asked)
    for load in (load_model, load_tokenizer):
        with pytest.raises(UserError, match="not here"):
            load("o/m", "v1")
    assert seen == [("o/m", B)] * 2


def test_a_changed_set_is_another_set(hub):
    task = get_task("sst2")
    hub.commits = {
        ("dataset", "o/d", None): A,
        ("dataset", "o/d", "v1"): B,
        ("dataset", "nyu-mll/glue", None): A,
        ("dataset", "nyu-mll/glue", "v1"): B,
    }
    for source, commit in (("hub:o/d", A), ("hub:o/d:c@v1", B), ("hub", A), ("hub@v1", B)):
        assert source_commit(task, source) == commit
        assert commit in source_fingerprint(task, source, "train")
    before = source_fingerprint(task, "hub:o/d", "train")
    commit_of.cache_clear()
    hub.commits["dataset", "o/d", None] = B
    assert source_fingerprint(task, "hub:o/d", "train") != before


def test_what_is_not_on_the_hub_is_one_sentence(hub, tmp_path):
    with pytest.raises(UserError, match=r"cannot load model o/m \(no such folder here.*no such model"):
        identity.model_fingerprint("o/m")
    (tmp_path / "my-model").mkdir()
    with pytest.raises(UserError, match=r"no such folder here, nearest is \S+/my-model, and as a hub id"):
        load_config(str(tmp_path / "my-modle"))
    with pytest.raises(UserError, match=r"cannot load --data hub:o/d: no such dataset.*--data FOLDER"):
        source_fingerprint(get_task("sst2"), "hub:o/d", "train")
    with pytest.raises(UserError, match="is a folder, which has no revision 'v1'; drop --revision"):
        identity.model_fingerprint(str(tmp_path), "v1")
    assert source_commit(get_task("sst2"), str(tmp_path)) is None
