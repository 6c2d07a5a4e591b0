"""Nothing is reused or resumed that other code or other libraries began."""

import copy
import json
from types import SimpleNamespace

import pytest

from qdqbench.eval.selection.sensitivity import measure
from qdqbench.eval.stages import stages
from qdqbench.quantize.calibration.record import CalibrationRecord
from qdqbench.quantize.models.identity import Pooling
from qdqbench.quantize.pipeline import pipeline
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import adapt_recipe, load_recipe, require_qat
from qdqbench.quantize.recipe.sections import Training
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.training import finetune, qat
from qdqbench.quantize.training.results import TrainingRun
from qdqbench.quantize.utils.errors import UserError
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
    given = {"base": session.model_name, "task": GLUE["sst2"], "data": "d", "folder": session.folder}
    given |= {"seeds": 1, "max_length": 64, "keep_head": False, "limit": None, "command": ""}
    request = finetune.FinetuneRequest(settings=Training(), **given)
    seeds = SimpleNamespace(request=request, task=request.task, fingerprint="f")
    return finetune._Seeds.identify(seeds, Training())


def trial_settings(session):
    trials = measure.Measurement(session, 8).trials
    trials.__dict__["drawn"] = SimpleNamespace(fingerprint="f"), None
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


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("baseline", {"pooling": Pooling(mode="cls")}),
        ("export", {"pooling": Pooling(mode="cls")}),
        ("quantize", {"export.qkv_scales": "shared"}),
        ("fake_quant", {"export.gelu": "tanh"}),
    ],
)
def test_a_setting_that_changes_an_outcome_runs_its_stage_again(stage, changes, session):
    data = session.folder / "data" / "validation.csv"
    data.write_text("sentence,label\na,0\n")
    config = session.config
    if "pooling" not in changes:
        changes = {"recipe": adapt_recipe(config.recipe, fields=changes)}
    other = Session(config.model_copy(update=changes), session.folder)
    one, two = (stages.stages(each)[stage].inputs(each) for each in (session, other))
    assert one != two
    if "pooling" in changes:
        assert qat_identity(session) != qat_identity(other)
        assert trial_settings(session) != trial_settings(other)


def test_trials_of_another_backend_are_others(session):
    """`auto` of a recipe is another one as soon as OpenVINO is installed."""
    found = []
    for backend in ("onnxruntime", "openvino"):
        session.__dict__["target"] = SimpleNamespace(backend=backend)
        found.append(trial_settings(session))
    assert found[0] != found[1]


def test_own_texts_are_part_of_a_training(session, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    recipe = adapt_recipe(session.config.recipe, fields={"qat.texts": str(texts)})
    session = Session(session.config.model_copy(update={"recipe": recipe}), session.folder)
    found = []
    for text in ("one", "two"):
        (texts / "train.csv").write_text(f"sentence\n{text}\n")
        found.append(stages.stages(session)["qat"].inputs(session))
    assert found[0] != found[1]


def test_a_finished_training_is_of_the_rows_that_it_was_judged_on(session):
    folder = session.folder / "seed-0"
    folder.mkdir()
    run = TrainingRun(
        seed=0, status="done", settings={}, precision="fp32", device="CPU", processes=1, rows=1, held_out=1
    )
    finished = finetune._Finished(identity={"evaluation": ["a"]}, run=run)
    (folder / "training.json").write_text(finished.model_dump_json())
    request = SimpleNamespace(folder=session.folder)
    left = folder / finetune.CHECKPOINTS / "step-00000002"  # by a signal that came while they were removed
    left.mkdir(parents=True)
    about = {"request": request, "accelerator": SimpleNamespace(is_main_process=True)}
    about["identify"] = lambda settings: {}
    same, other = (SimpleNamespace(judged=[name], **about) for name in "ab")
    assert finetune._Seeds.train(same, Training()) == run
    assert not left.parent.exists()
    with pytest.raises(UserError, match="a finished training of another evaluation"):
        finetune._Seeds.train(other, Training())
