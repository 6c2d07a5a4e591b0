"""`bench` from the command line on a CPU, on a tiny model; and what is asked of engines."""

from functools import partial

import onnx
import pytest
import yaml

from qdqbench import _bench as api_bench
from qdqbench.eval.bench import run as bench_run
from qdqbench.eval.bench import target as bench_target
from qdqbench.eval.bench.systems import Config, profiles_of
from qdqbench.quantize.calibration.record import read_record, write_record
from qdqbench.quantize.engine import backend
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.models.families.known import MODEL_SHAPES
from qdqbench.quantize.pipeline.pipeline import open_run
from qdqbench.quantize.pipeline.session import RunConfig
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS

from ...support.fake_bench import fake_target, invoke, split_of, write_texts
from ...support.tiny_bert import INT8, recipe_with


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    """Two cores, and sessions of four systems."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_no_gpu_is_a_missing_device_before_anything_is_exported(tiny_bert, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_run, "find_gpu", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_with(engine={"backend": "tensorrt_rtx"}).model_dump(mode="json")))
    outcome = invoke("bench", "--model", tiny_bert, "--recipe", recipe, "--out", tmp_path / "out")
    assert isinstance(outcome.exception, MissingDevice)
    assert outcome.exception.exit_code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a run directory or --model"),
        (["run", "--model", "bert-base"], "either a run directory or --model"),
        (["run", "--recipe", "bert-fp16"], "--recipe belongs to --model"),
        (["run", "--set", "gate.max_drop=1"], "--set belongs to --model; run has its own, and its engine is"),
        (["run", "--pooling", "mean"], "--pooling belongs to --model; run has its own"),
        (["run", "--data", "texts.csv"], "--data belongs to --dataset TASK"),
        (["run", "--dataset-batch", "4"], "--dataset-batch belongs to --dataset TASK"),
        (["--model", "bert-base", "--normalize"], "--normalize belongs to --pooling"),
        (["--model", "bert-base", "--cpu", "--exclude", "mine"], "--exclude mine: no system is called that"),
        (["--model", "bert-base", "--cpu", "--build-only"], "--build-only belongs to a bench on a GPU"),
        (["--model", "x", "--compile-seconds", "0"], "--compile-seconds 0.0: should be greater than 0"),
        (["--model", "bert-base", "--cpu", "--threads", "9999"], "--threads 9999 is more than the"),
        (["--model", "bert-base", "--cpu", "--streams", "99", "--threads", "1"], "--streams 99 is more than"),
        (["no-such-run", "--cpu"], "is no run directory"),
        (["--model", "EMPTY", "--cpu", "--out", "OUT"], "has no config.json, so it is no model"),
    ],
)
def test_wrong_options_are_one_sentence(arguments, message, tmp_path):
    paths = {"OUT": tmp_path / "out", "EMPTY": tmp_path}
    outcome = invoke("bench", *(paths.get(part, part) for part in arguments))
    assert not (tmp_path / "out").exists()
    assert isinstance(outcome.exception, UserError)
    assert message in str(outcome.exception)


SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture
def tiny(monkeypatch):
    """Built-in shapes of two layers."""
    bert = SIZES | {"model_type": "bert", "vocab_size": 500}
    roberta = {
        "model_type": "xlm-roberta",
        "vocab_size": 100,
        "pad_token_id": 1,
        "max_position_embeddings": 130,
    }
    monkeypatch.setitem(MODEL_SHAPES, "bert-tiny", bert)
    monkeypatch.setitem(MODEL_SHAPES, "tiny", SIZES | roberta)


def test_a_built_in_shape_is_seeded_and_labelled(tmp_path, tiny):
    recipe, sums = load_recipe("bert-int8-linears"), []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        target = bench_target.model_target("bert-tiny", recipe, tmp_path / folder, seed)
        sums.append(target.about.files["model.int8.onnx"])
        assert (target.about.kind, target.about.random_weights) == ("shape", True)
        assert "random token ids" in target.about.calibration
        assert (target.about.shape["layers"], target.about.shape["vocabulary"]) == (2, 500)
    assert sums[0] == sums[1] != sums[2]


def test_an_int8_softmax_gets_a_scale_for_the_lengths_that_are_measured(tmp_path, tiny):
    target = bench_target.model_target("bert-tiny", load_recipe("bert-int8-attention"), tmp_path, 0, 320)
    rows = read_record(target.session.record_path).softmax
    # of even attention over 320 tokens scale 1/127 makes nothing but zeros
    assert {row.length for row in rows} == {384}
    assert all(row.error < 0.3 for row in rows)
    assert bench_target.softmax_notes(target, (128, 320)) == []
    (said,) = bench_target.softmax_notes(target, (320, 512))
    assert "calibration saw 320 tokens at most: at 512 the INT8 softmax loses more" in said
    record = read_record(target.session.record_path)
    softmax = [row.model_copy(update={"row_max": True}) for row in record.softmax]
    write_record(target.session.record_path, record.model_copy(update={"softmax": softmax}))
    assert bench_target.softmax_notes(target, (128,)) == [
        "engines of TensorRT have softmax_scale: fixed, as row-max is for our kernels alone"
    ]


RULES = [
    {"match": "encoder.layer.*", "type": "Linear", **INT8},
    {"match": "*", "type": "Attention", "precision": "int8"},
]


def test_lengths_that_do_not_fit_are_refused(tmp_path):
    target = fake_target(folder=tmp_path)
    bench_target.check_lengths(target, [128, 512])
    with pytest.raises(UserError, match="--length 513, 1024 is too long: bert-base has 512 positions"):
        bench_target.check_lengths(target, [128, 513, 1024])
    by_rule = recipe_with(rules=RULES, precision={"never_quantize": ["layernorm"]})
    assert by_rule.attention == "fp16"
    for recipe in (recipe_with("bert-int8-attention"), by_rule):
        target = fake_target(recipe, tmp_path)
        target.about.shape["positions"] = 2048
        with pytest.raises(UserError, match="fused up to 512"):
            bench_target.check_lengths(target, [1024])


@pytest.mark.parametrize(("data", "needs"), [(None, "--data"), ("hub", "--tokenizer")])
def test_dataset_need_data_and_a_tokenizer(tmp_path, data, needs):
    options = {"batches": [8], "data": data, "tokenizer": None, "buckets": True}
    with pytest.raises(UserError, match=f"needs {needs}"):
        bench_target.batched_splits(fake_target(folder=tmp_path), "sst2", **options)


@pytest.fixture
def words(tmp_path, tiny_bert):
    """A target, and its split of 40 sentences of 1 to 100 words as batches."""
    target, data = fake_target(folder=tmp_path), str(write_texts(tmp_path / "data"))
    make = partial(bench_target.batched_splits, target, "sst2", data=data, tokenizer=str(tiny_bert))
    return target, make


def test_dataset_without_buckets_are_the_sorted_batches_of_the_split(words):
    target, make = words
    (split,) = make(batches=[4], buckets=False)
    assert (split.task, split.batch, split.sequences, split.bucketed) == ("sst2", 4, 40, False)
    lengths = [batch["input_ids"].shape[1] for batch in split.batches]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths == [int(batch["attention_mask"].sum(axis=1).max()) for batch in split.batches]
    assert split.real_tokens == sum(int(batch["attention_mask"].sum()) for batch in split.batches)
    export = target.session.recipe.export.model_copy(update={"max_length": 30})
    target.session.recipe = target.session.recipe.model_copy(update={"export": export})
    (cut,) = make(batches=[4], buckets=False)
    assert cut.batches[0]["input_ids"].shape[1] == 30  # the longest that there is
    target.about.shape["vocabulary"] = 10
    with pytest.raises(UserError, match=r"gives id .* has 10 ids"):
        make(batches=[4], buckets=False)


def test_dataset_in_buckets_are_a_shape_for_each(words):
    target, make = words
    (plain,), (small, large) = make(batches=[4], buckets=False), make(batches=[4, 64], buckets=True)
    assert (small.batch, large.batch, large.sequences) == (4, 64, 40)
    for split in (small, large):
        lengths = [length for _, length in split.shapes]
        assert lengths == sorted(set(lengths), reverse=True)
        assert len(lengths) <= 6
        assert min(lengths) >= 16  # the recipe takes no less
        assert split.real_tokens == plain.real_tokens
        rows = sum(len(batch["input_ids"]) for batch in split.batches)
        assert 0 <= rows - 40 < len(split.batches)  # at most a copy a batch
        cell = Config(split.batch, None, split)
        assert profiles_of(target, "exact", cell) == [Profile(pair, pair, pair) for pair in split.shapes]
    assert len(large.batches) == len(large.shapes)
    of_texts = {tuple(row[row != 0]) for batch in small.batches for row in batch["input_ids"]}
    assert of_texts == {tuple(row[row != 0]) for batch in plain.batches for row in batch["input_ids"]}


def test_shapes_of_data_need_a_run(tmp_path):
    path = tmp_path / "auto.yaml"
    path.write_text("{version: 1, name: mine, engine: {shapes: auto}}")
    with pytest.raises(UserError, match="give its run directory, or --engine-shapes exact"):
        api_bench.bench(model="bert-base", recipe=str(path))


def test_a_run_that_exported_nothing_is_refused(tiny_bert, tmp_path):
    task = get_task("sst2")
    open_run(
        RunConfig(recipe=load_recipe("bert-fp16"), model=str(tiny_bert), task=task, data="hub"),
        tmp_path / "run",
    )
    with pytest.raises(UserError, match=r"has no model\.fp32\.onnx, model\.fp16\.onnx; write them with"):
        bench_target.run_target(tmp_path / "run")


def test_profiles_are_exactly_the_shape_or_the_recipes(tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "WITHOUT_GPU", ("tensorrt_rtx",))
    target, only = fake_target(folder=tmp_path), (8, 128)
    (made,) = profiles_of(target, "exact", Config(8, 128, None))
    assert (made.min, made.opt, made.max) == (only, only, only)
    real = Config(32, None, split_of((32, 64), (32, 40), (32, 24), (8, 16)))
    assert profiles_of(target, "exact", real) == [Profile(min=(8, 16), opt=(32, 40), max=(32, 64))]
    *full, every = profiles_of(target, "recipe", real)
    assert (every.min, every.opt, every.max) == ((1, 16), (32, 128), (128, 128))
    assert [each.min[1] for each in full] == [128, 128, 128]
    monkeypatch.setattr(backend, "WITHOUT_GPU", CPU_BACKENDS)
    target.session.target = choose_target(target.session.recipe)
    assert profiles_of(target, "recipe", real) == [every]


def test_a_built_in_shape_as_an_embedding_model(tmp_path, tiny):
    found = api_bench.bench(
        model="tiny", recipe="int8-linears", pooling="mean", normalize=True, batch=[2], length=[16],
        rounds=1, iterations=1, cpu=True, baselines=False, out=tmp_path, set={"calibration.method": "mse"},
    )  # fmt: skip
    assert not found.errors
    assert found.recipe["calibration"]["method"] == "mse"
    (cell,) = found.configs
    assert all(row.rel_error is None or row.rel_error < 0.2 for row in cell.rows)
    graph = onnx.load(tmp_path / "work" / "model.int8.onnx", load_external_data=False)
    assert [value.name for value in graph.graph.output] == ["sentence_embedding"]
