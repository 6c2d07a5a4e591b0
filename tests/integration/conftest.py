import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from .tiny import Given, Outcome, call, one_profile, write_data, write_model


@pytest.fixture(scope="session")
def given(tmp_path_factory) -> Callable[[str], Given]:
    """Model and data of a task by name; made when first asked for."""
    root, made = tmp_path_factory.mktemp("given"), {}

    def make(task: str = "sst2") -> Given:
        if task not in made:
            write_data(root / "data", task)
            made[task] = Given(write_model(root / task, task), task, root / "data")
        return made[task]

    return make


@pytest.fixture
def sst2(given) -> Given:
    return given("sst2")


@pytest.fixture
def qdqbench(capsys) -> Callable[..., Outcome]:
    """The command line, in this process."""
    return lambda *arguments: call(capsys, *arguments)


@pytest.fixture(autouse=True)
def _no_progress_lines(monkeypatch) -> None:
    """A slow machine must not add lines to what a test compares; they have tests of their own."""
    monkeypatch.setattr("qdqbench.quantize.cli.progress.EVERY_S", float("inf"))


@pytest.fixture(autouse=True)
def _trained_once(monkeypatch, tmp_path_factory) -> None:
    """The embedded default is trained by the first test that wants it; the others get copies."""
    from qdqbench.quantize.tasks import embedded

    real = embedded.write_embedded

    def write(folder, *, seed=0, progress=None, size=None):
        store = tmp_path_factory.getbasetemp() / f"embedded-{seed}-{size}"
        if store.is_dir() and not folder.exists():
            shutil.copytree(store, folder)
        run = real(folder, seed=seed, progress=progress, size=size)
        if not store.is_dir():
            shutil.copytree(folder, store)
        return run

    monkeypatch.setattr(embedded, "write_embedded", write)


@pytest.fixture(autouse=True)
def _one_profile(request) -> Iterator[None]:
    """One profile, but where shipped recipes are what is tested."""
    name = request.node.name
    all_of_them = "-qat" not in name and ("shipped" in name or "embedded_default" in name)
    with nullcontext() if all_of_them else one_profile():
        yield


@pytest.fixture(scope="session")
def finished_run(given, tmp_path_factory) -> Path:
    """A whole run of the default recipe, never to be written to."""
    from qdqbench.eval.runs.run import run_until
    from qdqbench.quantize.recipe.schema import load_recipe
    from qdqbench.quantize.rundir.pipeline import open_run
    from qdqbench.quantize.rundir.session import RunConfig
    from qdqbench.quantize.tasks.task import get_task

    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'")
    sst2 = given("sst2")
    config = RunConfig(
        recipe=load_recipe("bert-int8-linears"),
        model=str(sst2.model),
        task=get_task("sst2"),
        data=str(sst2.data),
    )
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_until(open_run(config, folder), None)
    return folder


@pytest.fixture
def a_run(finished_run, tmp_path) -> Path:
    """A copy of the finished run, to do anything with."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))
