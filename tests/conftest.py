"""Fixtures that are dear enough to make once; property tests without deadlines and without luck."""

import functools
import gc
import os
import shutil
import sys
import warnings
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker is one core; before torch is imported
sys.modules["openvino_telemetry"] = None  # tests import OpenVINO: `load_openvino`
# The same draws in every run, so that no run fails by luck; `tools/fuzz.py` searches at random.
settings.register_profile("fixed", max_examples=40, deadline=None, derandomize=True, database=None)
# Hypothesis draws the same everywhere where CI is set, unless told otherwise.
_RANDOM = settings(
    deadline=None,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    print_blob=True,
)
settings.register_profile("random", _RANDOM)
settings.register_profile("search", _RANDOM, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """No garbage is looked for while libraries and tests are loaded, and later not among them.

    What survived two searches is looked through at the end of each file alone.
    """
    gc.disable()
    gc.set_threshold(700, 10, 1000)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _nothing_old_is_searched():
    """Nor later among libraries that a file's tests loaded: code under test collects garbage, too."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_command_line():
    """Typer makes all commands anew for each call; they are always the same."""
    import typer.main
    import typer.testing

    once = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", once)
        patch.setattr(typer.testing, "_get_command", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks():
    """What tests write need not survive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """A folder by name that one of all workers makes, never to be written to: `make` is given its path."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def once(name, make):
        made = root / "made-once" / name
        made.parent.mkdir(exist_ok=True)
        with FileLock(f"{made}.lock"):
            if not (done := Path(f"{made}.done")).exists():
                made.mkdir(exist_ok=True)
                make(made)
                done.touch()
        return made

    return once


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    """Folder of a tiny BERT; never changed by a test, copy it to break it."""
    from .support.tiny_bert import write_tiny_bert

    return write_tiny_bert(tmp_path_factory.mktemp("tiny-bert"))


@pytest.fixture
def hub_server(monkeypatch, tmp_path):
    """A stand-in for the Hub that huggingface_hub finds, with a token for it."""
    from huggingface_hub import constants

    from .support.hub_stub import TOKEN, served_hub

    with served_hub() as served, warnings.catch_warnings():
        # huggingface_hub's own call of httpx, on its way without Xet
        warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


@pytest.fixture(scope="session")
def browser():
    """Chromium without a window."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    options = {"executable_path": path, "args": ["--no-sandbox"]}
    with playwright.sync_playwright() as started, started.chromium.launch(**options) as opened:
        yield opened
