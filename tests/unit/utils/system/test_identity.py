"""Nothing is reused or resumed that other code or other libraries began."""

import copy
import json

import pytest

from qdqbench.eval.selection.sensitivity import measure
from qdqbench.quantize.calibration.record import CalibrationRecord
from qdqbench.quantize.pipeline import pipeline
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import load_recipe, require_qat
from qdqbench.quantize.recipe.sections import Training
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.training import finetune, qat
from qdqbench.quantize.utils.system import environment


@pytest.fixture
def session(tmp_path):
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "train.csv").write_text("sentence,label\na,0\n")
    recipe = load_recipe("bert-int8-attention-qat")
    places = {name: str(tmp_path / name) for name in ("model", "data")}
    config = RunConfig(recipe=recipe, task=GLUE["sst2"], **places)
    return Session(config, tmp_path)


def stage_key(session):
    stage = pipeline.Stage("a", lambda _: [], (), lambda _: 1)
    return pipeline._key(session, stage, pipeline._StageManifest())


def qat_identity(session):
    record = CalibrationRecord.model_construct(amax={}, method="max")
    return qat._identity(session, require_qat(session.recipe), record, "f")


def finetune_identity(session):
    request = finetune.FinetuneRequest(
        base=session.model_name,
        task=GLUE["sst2"],
        data="d",
        folder=session.folder,
        settings=Training(),
        seeds=1,
        max_length=64,
        keep_head=False,
        limit=None,
        command="",
    )
    data = finetune._FinetuneData.__new__(finetune._FinetuneData)
    data.fingerprint = "f"
    return finetune._identity(request, data, Training())


def trial_settings(session):
    trials = measure.Measurement(session, 8).trials
    trials.__dict__["drawn"] = type("Split", (), {"fingerprint": "f"})(), None
    trials.path.unlink(missing_ok=True)
    assert trials.store.trials == {}
    return json.loads(trials.path.read_text())


IDENTITIES = [stage_key, qat_identity, finetune_identity, trial_settings]


@pytest.mark.parametrize("identity_of", IDENTITIES)
@pytest.mark.parametrize("changed", ["versions", "_code_hash"])
def test_another_version_is_another_identity(identity_of, changed, session, monkeypatch):
    before = copy.deepcopy(identity_of(session))
    assert identity_of(session) == before
    monkeypatch.setattr(environment, changed, lambda: {"torch": "0.1"})
    assert identity_of(session) != before
