import html
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from qdqbench.quantize.report import svg

from .cases import CASES
from .tiny import Given, call, one_profile


@pytest.fixture(scope="session")
def given(made_once):
    """Model and data by the name of a task or type; made when first asked for."""

    def make(name="sst2"):
        from .brought import bring, task_of

        folder = made_once(f"given-{name}", lambda path: bring(name, path))
        data = next(path for path in (folder / "data", folder / "lines.txt") if path.exists())
        return Given(folder / "model", task_of(name), data)

    return make


@pytest.fixture
def sst2(given):
    return given("sst2")


@pytest.fixture
def recipe(tmp_path):
    """A file of a shipped recipe, calibrated with 64 samples: there are 256 to share."""
    from qdqbench.quantize.recipe.schema import load_recipe

    def write(name="bert-int8-linears", **calibration):
        text = load_recipe(name).model_dump(mode="json", exclude_defaults=True) | {"version": 1}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(text | {"calibration": {"samples": 64, **calibration}}))
        return path

    return write


@pytest.fixture
def qdqbench(capsys):
    """The command line, in this process."""
    return lambda *arguments: call(capsys, *arguments)


@pytest.fixture(scope="session", autouse=True)
def _no_progress_lines():
    """A slow machine must not add lines to what a test compares; they have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qdqbench._progress.EVERY_S", float("inf"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _quicker_bench():
    """What ends a run takes ten seconds otherwise; so many garbage collections take some of each test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qdqbench.eval.bench.run.gc", SimpleNamespace(collect=lambda: None))
        patch.setattr("qdqbench.eval.bench.quick.DURATION_S", 0.03)
        patch.setattr("qdqbench.eval.bench.quick.ROUNDS", 5)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Without a GPU "auto" builds for one ahead of time; engines for the CPU have tests of their own.

    Around each test of this folder, with the fixtures that it makes first: tests of others find it as it is.
    """
    from qdqbench.quantize.engine import backend

    with pytest.MonkeyPatch.context() as patch:
        if Path(__file__).parent in item.path.parents:  # pytest calls this for every test
            patch.setattr(backend, "WITHOUT_GPU", ("tensorrt_rtx",))
        return (yield)


@pytest.fixture(autouse=True)
def _undrawn(request, monkeypatch):
    """Drawing is a third of what these tests compute: charts are named, but in the runs of tests/runs."""
    if request.path.name != "test_runs.py":
        named = '<svg viewBox="0 0 1 1" role="img" aria-label="{}"></svg>'
        monkeypatch.setattr(svg, "svg_of", lambda figure, name, told: named.format(html.escape(told)))


@pytest.fixture(autouse=True)
def _trained_once(monkeypatch, made_once):
    """The built-in BERT is trained by the first test that wants it; all get copies."""
    from qdqbench.quantize.tasks import embedded

    real = embedded.write_embedded

    def write(folder, *, seed=0, size=None):
        store = made_once(f"embedded-{seed}-{size}", lambda made: real(made, seed=seed, size=size))
        if not folder.exists():
            shutil.copytree(store, folder)
        return real(folder, seed=seed, size=size)

    monkeypatch.setattr(embedded, "write_embedded", write)


@pytest.fixture(autouse=True)
def _one_profile(request):
    """One profile, but where shipped recipes are what is tested."""
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    all_of_them = getattr(case, "every_profile", "embedded_default" in request.node.name)
    with nullcontext() if all_of_them else one_profile():
        yield


@pytest.fixture(scope="session")
def whole_run(given, made_once, tmp_path_factory):
    """The folder of a case of tests/runs, never to be written to. Each worker has one, which it may lock."""

    @cache
    def folder_of(name):
        case = CASES[name]
        with pytest.MonkeyPatch.context() as patch:
            case.pretend(patch)
            made = made_once(f"run-{name}", lambda folder: case.run(given(case.brings), folder))
        return Path(shutil.copytree(made / "run", tmp_path_factory.mktemp("own") / name))

    return folder_of


@pytest.fixture(scope="session")
def finished_run(whole_run):
    """A whole run of the default recipe."""
    return whole_run("bert-int8-linears")


@pytest.fixture
def a_run(finished_run, tmp_path):
    """A copy of the finished run, to do anything with."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))
