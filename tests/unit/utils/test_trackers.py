"""Values that trackers get; the libraries are stand-ins with the calls of tensorboard, wandb and mlflow."""

import json
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from qdqbench.eval.runs.results import read_results
from qdqbench.eval.runs.tracked import tracking
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.trackers import LogRow, open_tracker, require_tracker

from ...support.records import speedup

MEASURED = Path(__file__).parents[3] / "docs/measured/report"
CONFIG = {"recipe": "bert-int8-linears"}


@pytest.fixture
def libraries(monkeypatch):
    """Modules by name, and what each was given: (name, value, step)."""
    given = []

    def log_all(values, step):
        given.extend((name, value, step) for name, value in values.items())

    def install(name, **members):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    class Run(nullcontext):
        def __enter__(self):
            return self

    class SummaryWriter(Run):
        def add_text(self, name, text):
            assert CONFIG[name] == text

        def add_scalar(self, name, value, step):
            given.append((name, value, step))

    class WandbRun(Run):
        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, values):
            log_all({name: value for name, value in values.items() if name != "step"}, values["step"])

    def init(project, name, config):
        print("offline")
        assert (project, name, config) == ("qdqbench", "run", CONFIG)
        return WandbRun()

    install("tensorboard")
    install("torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    install("wandb", init=init)
    start_run = lambda run_name: nullcontext()  # noqa: E731
    install("mlflow", set_experiment=str, start_run=start_run, log_params=dict, log_metrics=log_all)
    return SimpleNamespace(given=given, install=install)


def test_results_of_another_version_are_refused(tmp_path):
    known = json.loads((MEASURED / "results.json").read_text()) | {"schema_version": 3}
    (tmp_path / "results.json").write_text(json.dumps(known))
    with pytest.raises(UserError, match=r"schema_version: Input should be 4\); run `qdqbench report"):
        read_results(tmp_path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_each_tracker_gets_the_log_and_the_results(name, libraries, tmp_path, capsys):
    results = read_results(MEASURED)
    loaded = {"cpu": speedup(1.2), "other_cores": 1.3}  # the latest bench, first, where others took the cores
    results.speed = [speedup(0.7).model_copy(update=loaded), speedup(0.9)]
    rows = [LogRow(step=2, epoch=0.5, loss=0.25), LogRow(step=2, epoch=0.5, score=0.9, values={"f1": 0.8})]
    require_tracker(name)
    with tracking(name, tmp_path / "run", CONFIG) as run:
        reporter().begin("qat", 3, 9)
        for row in rows:
            reporter().advance(row.step, 9, row=row)
        run.finish(results)
        reporter().begin("seed 2", 1, 3)
        reporter().advance(2, 9, row=rows[0])
    given = {name: (value, step) for name, value, step in libraries.given}
    expected = {"train/loss": (0.25, 2), "held_out/score": (0.9, 2), "held_out/f1": (0.8, 2)}
    expected["seed-2/train/loss"] = (0.25, 2)
    expected["fp32/accuracy"] = (results.stages["fp32"].metrics["accuracy"], 2)
    expected["speedup/INT8 engine over FP16 engine/32 x 128"] = (1.2, 2)
    assert expected.items() <= given.items()
    assert capsys.readouterr().out == ""


def test_what_is_missing_or_refuses_is_one_sentence(libraries, monkeypatch, tmp_path):
    libraries.install("wandb", init=lambda **_: 1 / 0)
    with (
        pytest.raises(UserError, match=r"cannot report to wandb .ZeroDivisionError"),
        open_tracker("wandb", tmp_path, CONFIG),
    ):
        pass
    monkeypatch.setattr("qdqbench.quantize.utils.trackers.find_spec", lambda name: None)
    with pytest.raises(MissingDevice, match=r"--report-to mlflow .*`pip install .*mlflow"):
        require_tracker("mlflow")
