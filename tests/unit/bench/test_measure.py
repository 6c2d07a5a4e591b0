"""Latencies of a search from engines that are files: one twin, proof, and failures that are a trial's own."""

import os
import tempfile
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest

from qdqbench.eval.bench import measure as timing
from qdqbench.eval.selection.search import workspace
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.workspace import Workspace, make_space
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import Recipe, load_recipe
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.system.cpu import Cpu
from qdqbench.quantize.utils.system.gpu import Gpu

from ...support import fake_engines
from ...support.searches import placed
from ...support.tiny_bert import calibration_batches

TASK = Task(name="x", text_columns=("sentence",), num_labels=3, metrics=("accuracy",))
OPTIONS = SearchOptions(batch=8, length=32, speed="latency")


def session_on(backend, model, folder, compute="fp16"):
    base = load_recipe("bert-int8-linears").model_dump(mode="json") | {"calibration": {}}
    base["engine"]["backend"], base["precision"]["compute"] = backend, compute
    recipe = Recipe.model_validate(base)
    return Session(RunConfig(recipe=recipe, model=str(model), task=TASK, data="none"), folder)


@pytest.fixture
def work(tiny_bert, tmp_path, monkeypatch):
    session = session_on("tensorrt_rtx", tiny_bert, tmp_path)
    model = session.fp32_model
    made = Workspace(session, make_space(session.recipe, module_table(model), model.base_model_prefix), 8)
    monkeypatch.setattr(Session, "calibration_batches", lambda self: calibration_batches())
    return made


def opened(work, session=None, options=OPTIONS, stack=None):
    """The source of latencies, and the function that gives them."""
    return workspace.open_source(session or work.session, options, work, stack or ExitStack())


@pytest.fixture
def devices(monkeypatch):
    """A GPU and a backend that are not there."""
    fake_engines.install(monkeypatch)
    monkeypatch.setattr(workspace, "alone", lambda **_: nullcontext())
    monkeypatch.setattr(workspace, "find_gpu", lambda: Gpu("fake GPU", "0.0", None))
    monkeypatch.setattr(workspace, "choose_backend", lambda name: SimpleNamespace(name=name, version="0"))


@pytest.fixture
def measure(work, devices):
    """The function that gives latencies, on a GPU that is not there."""
    with ExitStack() as stack:
        source, found = opened(work, stack=stack)
        assert source.label == "measured on fake GPU, tensorrt_rtx 0"
        yield found


def test_a_speedup_is_over_one_twin(work, measure):
    some, more = placed(work.space, [(0, "output")]), placed(work.space, work.space.units)
    first, second = measure(*some), measure(*more)
    assert first.baseline_ms == second.baseline_ms == pytest.approx(8 * fake_engines.TWIN_MS)
    assert first.value == pytest.approx(1.05)
    assert second.value == pytest.approx(1.6)
    assert len(fake_engines.opened) == 3
    assert not fake_engines.opened[0].closed
    assert all(engine.closed for engine in fake_engines.opened[1:])
    twin, first, second = (engine.cache for engine in fake_engines.opened)
    assert first == second != twin


def test_nothing_in_int8_is_the_twin_itself(work, measure):
    measure(*placed(work.space, [(0, "output")]))
    found = measure(*placed(work.space, []))
    assert (found.system_ms, found.value, found.verdict) == (found.baseline_ms, 1.0, "as fast")
    assert len(fake_engines.opened) == 2


def test_a_trial_whose_engine_is_wrong_fails_and_the_next_one_runs(work, measure):
    trial = placed(work.space, [(1, "ffn-in")])
    fake_engines.spoilt.append(True)
    with pytest.raises(CheckFailed, match="NaN"):
        measure(*trial)
    fake_engines.spoilt.clear()
    fake_engines.unproven.append(True)
    with pytest.raises(CheckFailed, match="should be in INT8"):
        measure(*trial)
    fake_engines.unproven.clear()
    assert measure(*trial).value > 1


def test_files_of_engines_do_not_stay(work, measure):
    measure(*placed(work.space, [(1, "ffn-in")]))
    left = {path.suffix for path in work.session.folder.glob(".engines.*/*")}
    assert ".engine" in left  # the twin's
    assert len(list(work.session.folder.glob(".engines.*/*.engine"))) == 1


def test_a_shape_outside_of_the_profile_is_refused(work):
    with pytest.raises(UserError, match="--batch 500"):
        opened(work, options=SearchOptions(batch=500))


@pytest.fixture
def locks(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_one_worker_times_on_a_gpu_at_a_time(monkeypatch, locks):
    for _ in range(2):
        monkeypatch.setattr(timing, "gpu_uuid", lambda: "GPU-1")
        with timing.alone(on_cpu=False):
            with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"), timing.alone(on_cpu=False):
                pass
            monkeypatch.setattr(timing, "gpu_uuid", lambda: "GPU-2")
            with timing.alone(on_cpu=False):
                pass


def test_one_process_times_on_a_cpu_at_a_time(work, tiny_bert, locks):
    session = session_on("openvino", tiny_bert, locks)
    for _ in range(2):
        with timing.alone(on_cpu=True), pytest.raises(UserError, match="engines on this CPU"):
            opened(work, session)


def test_a_lock_that_cannot_be_opened_is_one_sentence(locks):
    (locks / f"qdqbench-cpu-{os.getuid()}.lock").mkdir()
    with pytest.raises(UserError, match=r"cannot lock .*; remove it"), timing.alone(on_cpu=True):
        pass


@pytest.mark.parametrize(
    ("compute", "features", "twin"),
    [("fp16", ("amx_bf16",), "BF16"), ("fp16", (), "FP32"), ("fp32", ("amx_bf16",), "FP32")],
)
def test_a_cpu_measures_where_its_runtime_is_the_backend(  # noqa: PLR0917
    work, devices, tiny_bert, monkeypatch, compute, features, twin
):
    cpu, asked = Cpu("a CPU", 2, features), []
    monkeypatch.setattr("qdqbench.quantize.engine.target.find_cpu", lambda: cpu)
    monkeypatch.setattr(workspace, "find_cpu", lambda: cpu)
    monkeypatch.setattr(
        timing, "build", lambda *a, **k: asked.append(k["compute"]) or fake_engines.build(*a, **k)
    )
    session = session_on("openvino", tiny_bert, work.session.folder, compute)
    with ExitStack() as stack:
        source, measure = opened(work, session, SearchOptions(batch=8, length=32), stack)
        assert (source.mode, source.gpu, source.cpu) == ("latency", None, str(cpu))
        assert source.baseline_precision == twin
        assert source.label == f"measured on {cpu}, openvino 0"
        assert measure(*placed(work.space, [(0, "output")])).value == pytest.approx(1.05)
    assert asked == [twin.lower()] * 2  # the twin's, then the engine's


def test_without_a_gpu_the_int8_share_is_compared(work, monkeypatch):
    monkeypatch.setattr(workspace, "find_gpu", lambda: None)
    with pytest.raises(MissingDevice, match="--speed int8-share"):
        opened(work)
    options = SearchOptions(batch=8, length=32)
    source, measure = opened(work, options=options)
    assert (source.mode, source.backend, source.gpu) == ("int8-share", "", None)
    assert measure(*placed(work.space, work.space.units)) is None
    shares = [
        work.int8_share(placed(work.space, units, attention)[1], 32)
        for units, attention in (([], []), ([(0, "output")], []), ([(0, "output")], [0]))
    ]
    hidden, inner = 32, 64
    layer = 32 * (4 * hidden**2 + 2 * hidden * inner) + 2 * 32**2 * hidden
    linear, attended = 32 * hidden**2, 2 * 32**2 * hidden
    assert shares == pytest.approx([0, linear / (2 * layer), (linear + attended) / (2 * layer)])
    gate = work.session.recipe.gate.model_copy(update={"min_speedup": 1.2})
    work.session.config.recipe = work.session.recipe.model_copy(update={"gate": gate})
    with pytest.raises(MissingDevice, match="min_speedup of recipe bert-int8-linears needs a measured"):
        opened(work, options=options)


def test_models_are_made_from_shared_calibrations(work, monkeypatch):
    calls = []
    calibrate = ptq.calibrate
    monkeypatch.setattr(ptq, "calibrate", lambda *a, **k: calls.append(1) or calibrate(*a, **k))
    for units in ([(0, "output")], [(1, "qkv"), (1, "output")], list(work.space.units)):
        work.model(*placed(work.space, units))
    work.model(*placed(work.space, [(0, "output")], [0]))
    assert len(calls) == 1
    again = Workspace(work.session, work.space, 8)
    again.model(*placed(work.space, [(1, "output")]))
    assert len(calls) == 1  # from the folder
