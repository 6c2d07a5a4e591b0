"""The quick bench of a run, without the measurement: what takes part, and that no report is lost for it."""

from types import SimpleNamespace

import pytest

from qdqbench import _runs
from qdqbench._options import RunOptions
from qdqbench.eval.bench import quick
from qdqbench.eval.bench.systems import configs_of, systems_of
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.pipeline.outcomes import Skipped
from qdqbench.quantize.recipe.schema import adapt_recipe, load_recipe
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice

from ...support.fake_bench import fake_target

RAN = {"read_built": object(), "read_engine_run": object()}


@pytest.fixture
def session(tmp_path):
    config = SimpleNamespace(seed=0, command="qdqbench run")
    return SimpleNamespace(folder=tmp_path, recipe=load_recipe("bert-int8-linears"), config=config)


def fake_devices(monkeypatch, run_bench):
    """Let a GPU be its backend, and a CPU None."""
    monkeypatch.setattr(quick, "require_gpu", lambda choice: (choice, "1.0"))
    monkeypatch.setattr(quick, "open_work", lambda backend, stack: backend)
    monkeypatch.setattr(quick, "run_bench", run_bench)


def measured(session, monkeypatch, backend, *, outcome=None, **found):
    """What `bench_quickly` returns, the systems that it measured, its plan and its written benches."""
    session.recipe = adapt_recipe(session.recipe, backend=backend)
    session.target = choose_target(session.recipe)
    target, plans, written = fake_target(session.recipe), [], []

    def run_bench(target, plan, work, *, command):
        plans.append(([*systems_of(target, plan)], plan, work))
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(errors=outcome or [], configs=[SimpleNamespace(headline=not outcome)])

    for name, value in (RAN | found | {"session_target": target}).items():
        monkeypatch.setattr(quick, name, lambda _, value=value: value)
    fake_devices(monkeypatch, run_bench)
    monkeypatch.setattr(quick, "write_bench", lambda path, bench: written.append(path.name))
    return quick.bench_quickly(session), plans, written


@pytest.mark.parametrize(
    ("backend", "systems"),
    [
        ("openvino", ["int8", "fp32-openvino"]),
        ("onnxruntime", ["int8", "fp32-onnxruntime"]),
        ("tensorrt_rtx", ["int8", "fp16"]),
        ("cuda", ["int8", "torch-fp16"]),
    ],
)
def test_an_engine_is_timed_next_to_its_twin(session, monkeypatch, backend, systems):
    monkeypatch.setattr("qdqbench.quantize.engine.target.choose_compute", lambda *_: "fp32")
    said, [(names, plan, work)], written = measured(session, monkeypatch, backend)
    assert (said, written, names, plan.quick) == ("", ["bench.json"], systems, True)
    on_cpu = session.target.on_cpu
    assert work == (None if on_cpu else (backend, "1.0"))
    assert plan.device == ("cpu" if on_cpu else "gpu")
    last = (32, 32) if on_cpu else (32, 128)
    assert [config.shapes for config in configs_of(plan)] == [[(1, 128)], [(8, 128)], [last]]


@pytest.mark.parametrize(
    "outcome",
    [CheckFailed("it failed"), MissingDevice("it failed"), RuntimeError("it failed"), ["it failed"]],
)
def test_what_fails_is_a_note_and_no_bench(session, monkeypatch, outcome):
    said, _, written = measured(session, monkeypatch, "tensorrt_rtx", outcome=outcome)
    assert said.endswith("quick bench: it failed")
    assert written == []


@pytest.mark.parametrize("name", RAN)
def test_an_engine_that_did_not_run_is_not_timed(session, monkeypatch, name):
    found = {name: Skipped(skipped="no GPU here")}
    assert measured(session, monkeypatch, "tensorrt_rtx", **found) == ("", [], [])


@pytest.mark.parametrize(
    ("kernels", "takes", "said"),
    [
        ([0.1, 0.1, 0.2], True, "auto takes cuda: 2 layers took 0.1 against 0.1 ms at 1 x 128, "),
        ([0.1, 0.11, 0.2], False, "auto takes TensorRT-RTX: 2 layers took 0.1 against 0.1 ms at 1 x 128, "),
        ([0.1, 0.1], False, "auto takes TensorRT-RTX: timing cuda failed (no memory)"),
    ],
)
def test_auto_takes_the_backend_that_was_as_fast_at_every_shape(  # noqa: PLR0917
    tiny_bert, tmp_path, monkeypatch, kernels, takes, said
):
    plans = []

    def run_bench(target, plan, work, *, command):
        assert target.session.fp32_model.config.num_hidden_layers == quick.TIMED_LAYERS
        plans.append([*systems_of(target, plan)])
        cells = []
        for ours in kernels:
            rows = {"int8-cuda": ours, "int8": 0.1 if ours < 0.2 else 0.25}
            rows = [SimpleNamespace(system=k, status="done", median_ms=v) for k, v in rows.items()]
            cells.append(SimpleNamespace(rows=rows))
        return SimpleNamespace(configs=cells, errors=["no memory"], warnings=[])

    fake_devices(monkeypatch, run_bench)
    monkeypatch.setattr(quick, "gpu_backend", lambda: "tensorrt_rtx")
    monkeypatch.setattr(_runs, "explain_kernels", lambda *_: None)
    monkeypatch.setattr(_runs, "find_gpu", object)
    shown = []
    monkeypatch.setattr(_runs, "reporter", lambda: SimpleNamespace(log=shown.append))
    chosen = _runs.choose_recipe(RunOptions(model=str(tiny_bert), task="sst2"), load_recipe("bert-int8-ffn"))
    assert plans == [["int8", "int8-cuda"]]
    assert shown[-1].startswith(said)
    assert chosen.engine.backend == ("cuda" if takes else "auto")
