import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from .tiny import Given, Outcome, call, one_profile, write_data, write_model


@pytest.fixture(scope="session")
def given(made_once) -> Callable[[str], Given]:
    """Model and data of a task by name; made when first asked for."""

    def make(task: str = "sst2") -> Given:
        def write(folder):
            write_data(folder / "data", task)
            write_model(folder / task, task)

        folder = made_once(f"given-{task}", write)
        return Given(folder / task, task, folder / "data")

    return make


@pytest.fixture
def sst2(given) -> Given:
    return given("sst2")


@pytest.fixture
def recipe(tmp_path) -> Callable[..., Path]:
    """A file of a shipped recipe, calibrated with 64 samples: there are 256 to share."""
    from qdqbench.quantize.recipe.schema import load_recipe

    def write(name: str = "bert-int8-linears", **calibration: object) -> Path:
        text = load_recipe(name).model_dump(mode="json", exclude_defaults=True) | {"version": 1}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(text | {"calibration": {"samples": 64, **calibration}}))
        return path

    return write


@pytest.fixture
def qdqbench(capsys) -> Callable[..., Outcome]:
    """The command line, in this process."""
    return lambda *arguments: call(capsys, *arguments)


@pytest.fixture(scope="session", autouse=True)
def _no_progress_lines() -> Iterator[None]:
    """A slow machine must not add lines to what a test compares; they have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qdqbench._progress.EVERY_S", float("inf"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _quicker_bench() -> Iterator[None]:
    """What ends a run takes ten seconds otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qdqbench.eval.bench.quick.DURATION_S", 0.03)
        patch.setattr("qdqbench.eval.bench.quick.ROUNDS", 3)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Without a GPU "auto" builds for one ahead of time; engines for the CPU have tests of their own.

    Around each test of this folder, with the fixtures that it makes first: tests of others find it as it is.
    """
    from qdqbench.quantize.engine import backend

    with pytest.MonkeyPatch.context() as patch:
        if Path(__file__).parent in item.path.parents:  # pytest calls this for every test
            patch.setattr(backend, "WITHOUT_GPU", ("tensorrt_rtx",))
        return (yield)


@pytest.fixture(autouse=True)
def _trained_once(monkeypatch, made_once) -> None:
    """The embedded default is trained by the first test that wants it; all get copies."""
    from qdqbench.quantize.tasks import embedded

    real = embedded.write_embedded

    def write(folder, *, seed=0, size=None):
        store = made_once(f"embedded-{seed}-{size}", lambda made: real(made, seed=seed, size=size))
        if not folder.exists():
            shutil.copytree(store, folder)
        return real(folder, seed=seed, size=size)

    monkeypatch.setattr(embedded, "write_embedded", write)


@pytest.fixture(autouse=True)
def _one_profile(request) -> Iterator[None]:
    """One profile, but where shipped recipes are what is tested."""
    name = request.node.name
    all_of_them = "-qat" not in name and ("shipped" in name or "embedded_default" in name)
    with nullcontext() if all_of_them else one_profile():
        yield


@pytest.fixture(scope="session")
def finished_run(given, made_once, tmp_path_factory) -> Path:
    """A whole run of the default recipe, never to be written to. Each worker has one, which it may lock."""
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'")

    def run(folder):
        with one_profile():
            given().run("bert-int8-linears", folder)

    return shutil.copytree(made_once("finished", run), tmp_path_factory.mktemp("own") / "finished")


@pytest.fixture
def a_run(finished_run, tmp_path) -> Path:
    """A copy of the finished run, to do anything with."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))
