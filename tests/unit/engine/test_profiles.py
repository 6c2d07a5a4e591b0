"""Several optimization profiles: in recipes, in real ahead-of-time builds, and in the stages of a run."""

import dataclasses
import importlib.util
import types

import datasets
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from qdqbench.eval.stages import stages
from qdqbench.quantize.engine import backend, sidecar
from qdqbench.quantize.engine import build as build_module
from qdqbench.quantize.engine.backend import build_engine, choose_backend
from qdqbench.quantize.engine.profiles import Profile, fit_batch, require_room
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.models.identity import Pooling
from qdqbench.quantize.pipeline import graphs, session
from qdqbench.quantize.recipe.schema import dump_recipe, load_recipe, parse_recipe, shipped_recipes
from qdqbench.quantize.recipe.sections import Shapes
from qdqbench.quantize.tasks.task import EMBED, GLUE
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.system.gpu import Gpu

from ...support.graphs import model_of
from ...support.records import engine_result

HEAD = "version: 1\nname: x\n"
TWO = "[{batch: [1, 1, 4], length: [16, 32, 128]}, {batch: [4, 32, 128], length: [16, 128, 128]}]"
PROFILES = [Profile((1, 16), (1, 32), (4, 128)), Profile((4, 16), (32, 128), (128, 128))]
HERE = Gpu("L4", "8.9", "580.1")


def recipe(shapes, more=""):
    return parse_recipe(f"{HEAD}engine: {{shapes: {shapes}, backend: tensorrt_rtx}}\n{more}", "x")


def takes(profiles, lengths, batch_size):
    """Whether evaluation would find a profile for every batch."""
    size = min(batch_size, max(shapes.max[0] for shapes in profiles))
    falling = sorted(lengths, reverse=True)
    try:
        for start in range(0, len(falling), size):
            fit_batch(profiles, len(falling[start : start + size]), falling[start], 16)
    except CheckFailed:
        return False
    return True


@given(
    lengths=st.lists(st.integers(1, 160), min_size=1, max_size=40),
    batch_size=st.integers(1, 48),
    ends=st.lists(st.tuples(st.integers(1, 48), st.integers(1, 160)), min_size=1, max_size=3),
)
def test_data_that_no_profile_takes_is_known_before_any_work(lengths, batch_size, ends):
    profiles = [Profile((1, 1), end, end) for end in ends]
    if takes(profiles, lengths, batch_size):
        require_room(profiles, np.array(lengths), batch_size)
        return
    with pytest.raises(UserError, match=r"engine\.shapes") as caught:
        require_room(profiles, np.array(lengths), batch_size)
    assert "\n" not in str(caught.value)
    longest = max(end[1] for end in ends)
    if max(lengths) > longest:
        limit = f"more than {longest} tokens (engine.shapes), the longest {max(lengths)};"
        assert limit in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "count"), [("{batch: [1, 2, 3]}", 1), ("[{batch: [1, 2, 3]}]", 1), (TWO, 2), ("{}", 1)]
)
def test_one_mapping_or_a_list(shapes, count):
    made = recipe(shapes)
    assert [type(each) for each in made.engine.profiles] == [Shapes] * count
    assert parse_recipe(dump_recipe(made), "again") == made
    assert type(made).model_validate_json(made.model_dump_json()) == made


def test_shipped_recipes_have_kernels_for_full_length_and_take_every_shape():
    for name in shipped_recipes():
        *full, every = load_recipe(name).engine.profiles
        assert {shapes.length for shapes in full} == {(128, 128, 128)}
        batches = [shapes.batch for shapes in full]
        highs = [high for _, _, high in batches]
        assert [low for low, _, _ in batches] == [1, *(high + 1 for high in highs[:-1])]  # without a gap
        assert every.batch[2] == batches[-1][2]
        assert (every.batch, every.length) == ((1, 32, 128), (16, 128, 128))
        assert {(1, 1, 4), (65, 128, 128)} <= {*batches}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ("[]", "engine: shapes is an empty list"),
        ("[{batch: [1, 2, 3]}, {lenght: [1, 2, 3]}]", r"'engine\.shapes\.1\.lenght', did you mean 'length'"),
        ("{lenght: [1, 2, 3]}", r"'engine\.shapes\.lenght', did you mean 'length'"),
        ("[{batch: [1, 2, 3]}, {batch: [3, 2, 1]}]", r"engine\.shapes\.1: batch must be \[min, opt, max\]"),
        ("[{length: [1, 2, 3]}, {length: [16, 128, 256]}]", "goes to 256, but export.max_length"),
        ("5", r"engine\.shapes: "),
        ("[5]", r"engine\.shapes\.0: "),
    ],
)
def test_each_of_a_list_is_checked(shapes, message):
    with pytest.raises(UserError, match=message) as caught:
        recipe(shapes)
    assert "mapping" not in str(caught.value) or "empty" in str(caught.value)


@pytest.fixture
def rtx(monkeypatch):
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt_rtx is not installed")
    monkeypatch.setattr(backend, "find_gpu", lambda: None)
    monkeypatch.setattr(sidecar, "find_gpu", lambda: None)
    return choose_backend("tensorrt_rtx")


def save(path, shapes):
    """x[..., 8] times a weight, plus a mask, under the names and shapes of `shapes`."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="/MatMul"),
        helper.make_node("Add", ["y", "mask"], ["z"], name="/Add"),
    ]
    kinds = dict.fromkeys((*shapes, "z"), TensorProto.FLOAT16)
    onnx.save(model_of(nodes, shapes, {"z": shapes["x"]}, {"w": np.ones((8, 8), np.float16)}, **kinds), path)
    return path


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": ("b", "l", 8), "mask": ("b", "l", 1)},  # a block's hidden states
        {"x": ("b", 2, "l", 8), "mask": ("b", 1, 1, 1)},  # heads and a mask
        {"x": ("b", "l", 8), "mask": (1, "l", 1)},
    ],
)
def test_inner_tensors_take_the_profiles_too(tmp_path, rtx, shapes):
    built = build_engine(save(tmp_path / "x.onnx", shapes), rtx, PROFILES)
    assert len(built.data) > 1000
    # the kernels are there once a profile
    assert {"[profile 1]" in row.name for row in built.layers if "MatMul" in row.name} == {True, False}


def test_inputs_without_a_length_are_refused(tmp_path, rtx):
    path = save(tmp_path / "x.onnx", {"x": ("b", "l", 8), "mask": (1,)})
    with pytest.raises(UserError, match=r"must be \[batch, length, ...\], not mask \[1\]"):
        build_engine(path, rtx, PROFILES)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A session with an exported graph and two profiles, and what the stages ask of it."""
    two = recipe(TWO, "precision: {compute: fp16}")
    made = types.SimpleNamespace(
        folder=tmp_path,
        recipe=two,
        target=choose_target(two),
        config=types.SimpleNamespace(batch_size=4, task=GLUE["sst2"]),
        plan=types.SimpleNamespace(int8=(), attention=(), residual=()),
        warnings=[],
        pad_id=0,
        eval_splits={"validation": (None, types.SimpleNamespace(lengths=np.full(40, 128)))},
    )
    monkeypatch.setattr(stages, "describe_texts", lambda *_: {"of": "texts"})
    files.write_json(tmp_path / "verify.json", {"skipped": "not asked for"})
    save(tmp_path / graphs.FP16, {"x": ("b", "l", 8), "mask": ("b", "l", 1)})
    return made


def test_stage_build_has_every_profile_and_no_cache_among_its_outputs(run, rtx):
    outputs = stages.build_stage(run)
    path = run.folder / "engine" / "model.fp16.engine"
    assert check_sidecar(path).profiles == PROFILES
    assert outputs[0:4:3] == [run.folder / "build.json", run.folder / "layers.json"]
    assert outputs[1:3] == [path, path.with_name("model.fp16.engine.json")]
    assert files.read_json(outputs[4]) == {"of": "texts"}
    assert run.warnings == []  # 8.9 is supported, and TensorRT-RTX has no timing cache
    assert not list(run.folder.rglob("*.cache"))


def test_stages_run_again_where_something_else_was_asked_for(tiny_bert, tmp_path):
    """With another --pooling, or precision.compute on a CPU, answers and engine of before were shown."""
    (tmp_path / "texts.txt").write_text("some\ntexts\n")

    def inputs(stage, mode="mean", compute="fp32", family="bert"):
        chosen = load_recipe("bert-int8-linears")
        chosen = chosen.model_copy(update={"model": chosen.model.model_copy(update={"family": family})})
        about = {"model": str(tiny_bert), "task": EMBED, "data": str(tmp_path / "texts.txt")}
        pooling = Pooling(mode=mode, normalize=False)
        made = session.Session(session.RunConfig(recipe=chosen, pooling=pooling, **about), tmp_path)
        made.target = dataclasses.replace(made.target, compute=compute)
        return stages.stages(made)[stage].inputs(made)

    for stage, change in {
        "baseline": {"mode": "cls"},
        "build": {"compute": "bf16"},
        "quantize": {"family": "roberta"},
    }.items():
        assert inputs(stage) == inputs(stage) != inputs(stage, **change)


def test_an_engine_is_built_again_where_the_data_name_its_classes_otherwise(tiny_bert, tmp_path):
    """Labels lie next to it: `predict` gave the names of before, and `deploy` the new ones."""
    found = []
    for names in (["no", "so", "yes"], ["yes", "so", "no"]):
        features = {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
        table = {"sentence": ["text"], "label": [0]}
        data = datasets.Dataset.from_dict(table, features=datasets.Features(features))
        data.to_parquet(tmp_path / "validation.parquet")
        about = {"model": str(tiny_bert), "task": GLUE["sst2"], "data": str(tmp_path)}
        made = session.Session(session.RunConfig(recipe=load_recipe("bert-int8-linears"), **about), tmp_path)
        found.append(stages.stages(made)["build"].inputs(made))
    assert found[0] != found[1]


def test_known_faults_are_noted_by_the_build(run, rtx, monkeypatch):
    monkeypatch.setattr(build_module, "find_hazards", lambda *given: [f"careful with {' '.join(given)}"])
    stages.build_stage(run)
    assert run.warnings == [f"careful with tensorrt_rtx {rtx.version} 8.9"]


def engine_row(**changes):
    """What the build stage records of an engine."""
    made = engine_result(0, version="1.6", file="x.engine", ahead_of_time=False, **changes)
    return made.model_dump(mode="json")


@pytest.mark.parametrize(
    ("built", "here", "reason"),
    [
        ({"skipped": "no backend"}, HERE, "no backend"),
        (engine_row(), None, "no GPU here"),
        (engine_row(compute_capability=["12.0"]), HERE, "for compute capability 12.0 and the L4 has 8.9"),
    ],
)
def test_stage_engine_says_why_it_cannot_run_and_warns_of_far_shapes(run, monkeypatch, built, here, reason):
    monkeypatch.setattr(stages, "find_gpu", lambda: here)
    files.write_json(run.folder / "build.json", built)
    assert stages.engine_stage(run) == [run.folder / "engine.json"]
    assert reason in files.read_json(run.folder / "engine.json")["skipped"]
    assert len(run.warnings) == 1
    assert "batch 4 where it is tuned for 32" in run.warnings[0]
    stages.engine_stage(run)
    assert len(run.warnings) == 1


def test_a_record_of_another_version_is_named(run):
    files.write_json(run.folder / "build.json", {"file": "x.engine"})
    with pytest.raises(UserError, match=r"build\.json is no record of a stage .* run `qdqbench build"):
        stages.engine_stage(run)


class Runner:
    """What engine_stages.engine takes from an EngineRunner."""

    max_batch = 3

    def __init__(self, path, onnx_path, *, pad_id, runtime_cache, outputs):
        self.engine = types.SimpleNamespace(notes=["the cache is ignored"], memory=None)
        assert (path.name, runtime_cache.name, [*outputs]) == ("x.engine", "runtime.cache", ["logits"])

    def __enter__(self):
        from qdqbench.quantize.engine.runtime.engine import EngineMemory

        self.engine.memory = EngineMemory(2_000_000, 1_500_000, 700_000, (600_000, 700_000))
        return self

    def __exit__(self, *_):
        pass


def test_stage_engine_records_memory_for_the_report(run, monkeypatch):
    sizes = []
    monkeypatch.setattr(stages, "find_gpu", lambda: HERE)
    monkeypatch.setattr(stages, "open_runner", Runner)

    def evaluate(session, stage, runner, batch_size, edges):
        sizes.append(batch_size)
        return run.folder / "engine.npz"

    monkeypatch.setattr(stages, "evaluate_stage", evaluate)
    files.write_json(run.folder / "build.json", engine_row())
    assert stages.engine_stage(run) == [run.folder / "engine.json", run.folder / "engine.npz"]
    record = files.read_json(run.folder / "engine.json")
    assert record["detail"] == (
        "tensorrt_rtx 1.6 on L4; GPU memory 1.5 MB for weights and code, 0.6, 0.7 MB for activations by "
        "profile; file 2.0 MB"
    )
    assert record["memory"]["activation_bytes_per_profile"] == [600_000, 700_000]
    assert sizes == [3]
    assert "the cache is ignored" in run.warnings


def test_a_machine_that_cannot_load_it_is_a_reason(run, monkeypatch):
    def fails(*_):
        raise MissingDevice("this torch has no CUDA")

    monkeypatch.setattr(stages, "find_gpu", lambda: HERE)
    monkeypatch.setattr(stages, "_run_engine", fails)
    files.write_json(run.folder / "build.json", engine_row())
    stages.engine_stage(run)
    assert files.read_json(run.folder / "engine.json") == {"skipped": "this torch has no CUDA"}


@pytest.fixture
def built(run, rtx):
    stages.build_stage(run)
    (run.folder / session.CONFIG).write_text("{}")
    return run.folder / "engine" / "model.fp16.engine"


def test_how_to_rebuild_an_engine(built, tmp_path, monkeypatch):
    """Without its sidecar, outside of a run, and of what the recipe makes for another GPU."""
    path, config = built.with_name(f"{built.name}.json"), tmp_path / session.CONFIG
    data, vouched = built.read_bytes(), path.read_bytes()
    path.unlink()
    with pytest.raises(UserError, match=rf"does not exist.* again with `qdqbench build {tmp_path}`$"):
        check_sidecar(built)
    path.write_bytes(vouched)
    built.write_bytes(b"other")
    config.unlink()
    with pytest.raises(
        UserError, match="not the one that was built; build it again with `qdqbench build RUN`"
    ):
        check_sidecar(built)
    built.write_bytes(data)
    config.write_text("{}")
    monkeypatch.setattr(sidecar, "find_gpu", lambda: Gpu("T4", "7.5", "580.1"))
    with pytest.raises(UserError, match=rf"build {tmp_path}` \(with engine.compute_capability: null"):
        check_sidecar(built)
