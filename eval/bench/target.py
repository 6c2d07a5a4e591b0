"""Targets of a bench: a finished run, a model folder, or a built-in shape with random weights."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.eval.bench.measure import session_sets
from qdqbench.eval.bench.results import BenchTarget
from qdqbench.eval.metrics.runners import placed
from qdqbench.eval.stages import stages
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.record import read_record, write_record
from qdqbench.quantize.calibration.techniques import softmax_scale
from qdqbench.quantize.calibration.techniques.softmax_scale import LONG
from qdqbench.quantize.engine.profiles import choose_edges
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.graph.export import ExportSettings, trace, write_graph
from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.models.families.known import MODEL_SHAPES, family_named, family_of
from qdqbench.quantize.models.identity import Pooling, has_pooling
from qdqbench.quantize.models.inputs import TOKENS
from qdqbench.quantize.models.load import load_model, load_tokenizer
from qdqbench.quantize.pipeline import graphs
from qdqbench.quantize.pipeline.data_profiles import length_edges
from qdqbench.quantize.pipeline.graphs import FP16, FP32, INT8
from qdqbench.quantize.pipeline.pipeline import open_run, run_stages
from qdqbench.quantize.pipeline.session import RunConfig, Session, read_config
from qdqbench.quantize.recipe.schema import Recipe, find_recipe, load_recipe
from qdqbench.quantize.report.formats import model_label
from qdqbench.quantize.standalone.texts import pad_batch
from qdqbench.quantize.tasks.data.encode import encode, sorted_batches, sorted_rows
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.task import EMBED, Task, get_task
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Array, Batch
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import INT8_ATTENTION_LENGTH, BackendName
from qdqbench.quantize.utils.names import DEFAULT_RECIPE
from qdqbench.quantize.utils.system.quiet import quiet

RANDOM_SAMPLES, RANDOM_BATCH = 32, 8  # of random ids: only latency is measured, so few are enough
RANDOM_IDS = "random token ids: accuracy means nothing"
GRAPHS = {"int8": INT8, "fp16": FP16, "fp32": FP32}


@dataclass
class Target:
    session: Session  # its folder holds the ONNX files
    about: BenchTarget
    extra: "dict[str, Target]" = field(default_factory=dict)  # the same model by other recipes
    forms: dict[ExportSettings, Path] = field(default_factory=dict)  # of the INT8 graph, for other backends
    _gemms: dict[Path, list[str]] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)  # removes them, at the end of a bench
    notes: list[str] = field(default_factory=list)

    @property
    def graphs(self) -> dict[str, Path]:
        paths = {name: self.session.folder / file for name, file in GRAPHS.items()}
        return {name: path for name, path in paths.items() if path.is_file()}

    def gemms(self, graph: Path) -> list[str]:
        """Return the GEMMs that a form of the INT8 graph must run in INT8."""
        if graph not in self._gemms:
            self._gemms[graph] = graphs.list_expected_gemms(graph, self.session.plan)
        return self._gemms[graph]

    def int8_graph(self, backend: BackendName) -> Path:
        """Return the INT8 graph in the form of a backend, written for benches where it is not the run's."""
        session, recipe = self.session, self.session.recipe
        own, wanted = (ExportSettings.of(recipe, name) for name in (choose_target(recipe).backend, backend))
        if own == wanted:
            return self.graphs["int8"]
        if wanted not in self.forms:
            path = session.folder / "bench" / f"model.int8.{backend}.onnx"
            if not (path.is_file() and path.stat().st_mtime > self.graphs["int8"].stat().st_mtime):
                outputs = session.config.task.kind.outputs
                model = session.fake_quant_model
                if backend != "cuda":  # no other engine takes codes over the largest of a row
                    softmax_scale.leave_row_max(model)
                traced = trace(model, recipe.export.opset, outputs)
                path.parent.mkdir(exist_ok=True)
                write_graph(traced, session.plan, wanted, path)
            self.forms[wanted] = path
        return self.forms[wanted]

    def drop_forms(self) -> None:
        for path in self.forms.values():
            path.unlink(missing_ok=True)

    @functools.cached_property
    def texts(self) -> list[Array]:
        """Return token ids of each calibration sample of the run; none where they do not load."""
        if self.about.kind != "run":
            return []
        try:
            with self.session.unnoted():
                return [ids for batch in self.session.calibration_batches() for ids in batch[TOKENS]]
        except (UserError, OSError) as error:
            self.notes.append(f"inputs are random token ids: the run's data do not load: {error}")
            return []

    @property
    def family(self) -> Family:
        return family_named(self.session.recipe.model.family)

    @property
    def runs_kernels(self) -> bool:
        """Return whether the recipe's own backend is cuda, and not TensorRT."""
        return self.session.recipe.engine.backend == "cuda"


def recipe_for(model: str, recipe: str | None) -> Recipe:
    name, shape = recipe or DEFAULT_RECIPE, MODEL_SHAPES.get(model)
    if shape:
        return load_recipe(name, lambda: family_of(shape["model_type"])).ptq
    return find_recipe(name, model).ptq


def run_target(folder: Path) -> Target:
    """Open a run directory with its exported files; UserError where nothing is exported yet."""
    return session_target(Session(read_config(folder), folder))


def session_target(session: Session) -> Target:
    folder, exports = session.folder, [FP32, FP16, *([INT8] if session.recipe.quantizes else [])]
    if missing := [name for name in exports if not (folder / name).is_file()]:
        raise UserError(f"{folder} has no {', '.join(missing)}; write them with `qdqbench export {folder}`")
    calibration = ""
    if session.recipe.quantizes:
        data = read_record(folder / "calibration.json").data
        calibration = f"{data.get('samples')} samples of split {data.get('split')}"
    return _target(session, "run", session.model_name, calibration)


def model_target(  # noqa: PLR0913, PLR0917
    model: str,
    recipe: Recipe,
    folder: Path,
    seed: int,
    longest: int = 0,
    pooling: Pooling | None = None,
    ready: Callable[[Path], None] = lambda run: None,
    *,
    twins: bool = True,
) -> Target:
    """Export a model folder or a built-in shape into `folder` by the stages of a run.

    Args:
        longest: tokens of the longest input to measure; an INT8 softmax needs a scale that holds there.
        pooling: of a built-in shape, or of a plain encoder, that is measured as an embedding model.
        ready: called with the run directory once the model can be loaded from it, before the export.
        twins: export the graphs in FP32 and FP16 too, which takes most of the time.
    """
    shape = MODEL_SHAPES.get(model)
    config = RunConfig(
        recipe=recipe,
        model=str(folder / "model") if shape else model,
        task=random_ids_task(None if shape else model, pooling),
        pooling=pooling,
        data="none",
        seed=seed,
        command="qdqbench bench",
    )
    session = open_run(config, folder)
    if shape:
        write_random_model(folder / "model", shape, seed)
    ready(folder)
    listed = stages.stages(session)
    export = listed["export"]
    if not twins and recipe.quantizes:
        run = partial(stages.export_stage, twins=False)
        export = replace(export, run=run, inputs=lambda session: [listed["export"].inputs(session), "alone"])
    steps = [export]
    if recipe.quantizes:
        most = max(longest, recipe.export.max_length)
        key = [session.model_sha256, recipe.model_dump(mode="json"), seed, most]
        calibrate = partial(_calibrate, longest=longest)
        steps.insert(0, replace(listed["quantize"], run=calibrate, inputs=lambda _: key))
    run_stages(session, steps)
    return _target(session, "shape" if shape else "model", model, RANDOM_IDS)


def check_lengths(target: Target, lengths: Sequence[int]) -> None:
    """Refuse lengths that the model or the recipe does not take with a UserError that names them."""
    longest = target.about.shape["positions"]
    reason = f"{target.about.name} has {longest} positions"
    recipe = target.session.recipe
    if recipe.int8_attention and longest > INT8_ATTENTION_LENGTH:
        longest = INT8_ATTENTION_LENGTH
        reason = f"INT8 attention is fused up to {longest} tokens"
    if wrong := [str(length) for length in lengths if length > longest]:
        raise UserError(f"--length {', '.join(wrong)} is too long: {reason}")


def softmax_notes(target: Target, lengths: Sequence[int]) -> list[str]:
    if not target.session.recipe.int8_attention:
        return []
    record, notes = read_record(target.session.record_path), []
    if any(row.row_max for row in record.softmax):
        notes.append("engines of TensorRT have softmax_scale: fixed, as row-max is for our kernels alone")
    seen = max(int(record.data["lengths"]["max"]), LONG)
    if longer := [str(length) for length in lengths if length > seen]:
        notes.append(
            f"calibration saw {seen} tokens at most: at {', '.join(longer)} the INT8 softmax loses more of "
            "the attention, and may put the logits over the limit; calibrate on samples as long"
        )
    return notes


def _calibrate(session: Session, *, longest: int) -> list[Path]:
    """Calibrate on random token ids; for latency alone, any finite scales make the same kernels.

    Samples have the recipe's `export.max_length` tokens, or `longest` where that is more: a softmax over them
    is nearly even, and INT8 with scale 1/127 makes it zero from 255 tokens on. Biases are not corrected: that
    changes no kernel and took two thirds of the time.
    """
    model, recipe = placed(session.new_int8_model()), session.recipe
    length = min(max(recipe.export.max_length, longest), session.plan.family.positions(model.config))
    batches = session_sets(session, RANDOM_BATCH, length, RANDOM_SAMPLES // RANDOM_BATCH)
    settings = session.calibration.model_copy(update={"bias_correction": False})
    record = ptq.calibrate(model, session.plan, batches, settings)
    record.data |= {"source": "random token ids", "split": "none"}
    path = session.folder / "calibration.json"
    write_record(path, record)
    return [path]


def _target(session: Session, kind: Any, model_name: str, calibration: str) -> Target:
    config, family = session.fp32_model.config, family_of(session.fp32_model.config)
    about = BenchTarget(
        kind=kind,
        name=model_label(model_name),
        random_weights=kind == "shape",
        calibration=calibration if session.recipe.quantizes else "none: nothing is quantized",
        shape={
            "layers": int(config.num_hidden_layers),
            "hidden": int(config.hidden_size),
            "heads": int(config.num_attention_heads),
            "intermediate": int(getattr(config, family.intermediate)),
            "vocabulary": int(config.vocab_size),
            "positions": family.positions(config),
            "parameters": sum(parameter.numel() for parameter in session.fp32_model.parameters()),
        },
        files={},
    )
    target = Target(session, about)
    about.files.update({path.name: files.sha256(path) for path in target.graphs.values()})
    return target


def random_ids_task(model: str | None, pooling: Pooling | None = None) -> Task:
    """Return a task without data for a model folder; None: for a model of `write_random_model`."""
    if pooling or (model is not None and has_pooling(model)):
        return EMBED.model_copy(update={"name": "random-token-ids"})
    labels = int(load_model(model).config.num_labels or 0) if model else 2
    metrics = ("pearson",) if labels == 1 else ("accuracy",)
    return Task(name="random-token-ids", text_columns=("sentence",), num_labels=labels, metrics=metrics)


def write_random_model(folder: Path, shape: dict[str, Any], seed: int) -> None:
    """Save a classifier of a shape with seeded random weights; an existing one is kept."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    stamp, identity = folder / "seed.json", {**shape, "seed": seed}
    if stamp.is_file() and files.read_json(stamp) == identity:
        return
    stamp.unlink(missing_ok=True)
    with torch.random.fork_rng(devices=[]), quiet("transformers"):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**shape, num_labels=2)
        classifier: Any = AutoModelForSequenceClassification
        classifier.from_config(config).save_pretrained(folder)
    files.write_json(stamp, identity)


@dataclass(frozen=True)
class BatchedSplit:
    task: str
    batch: int
    batches: list[Batch]  # padded
    rows: list[int]  # of each batch; what it holds beyond them are copies of its last one
    sequences: int  # of the split
    real_tokens: int
    bucketed: bool = False  # few shapes, worth kernels of their own

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(tuple(batch["input_ids"].shape) for batch in self.batches))

    @property
    def padded_tokens(self) -> int:
        return sum(batch["input_ids"].size for batch in self.batches)


def batched_splits(  # noqa: PLR0913
    target: Target,
    task: str,
    *,
    batches: Sequence[int],
    data: str | None,
    tokenizer: str | None,
    buckets: bool,
) -> tuple[BatchedSplit, ...]:
    """Return the first evaluation split of a task for each batch size, in the batches that every system runs.

    On a GPU kernels are made for shapes: each batch is padded to one of a few lengths, and may hold a copy of
    a row, so that a bucket is one shape. On a CPU a batch is as long as its longest row, as in `predict`.

    Args:
        data: source of the task, as in `qdqbench run`; needed where the target is no run of that task.
        tokenizer: folder or hub id; needed for a built-in shape.
        buckets: pad to a few lengths: those of the run with `shapes: auto`, else those that pad least.
    """
    session, about = target.session, target.about
    own = about.kind == "run" and session.config.task.name == task
    if data is None and not own:
        raise UserError(
            f"--dataset {task} needs --data (hub or a folder): {about.name} does not have that task"
        )
    if tokenizer is None and about.kind == "shape":
        raise UserError(f"--dataset needs --tokenizer: the shape {about.name} has none")
    chosen = session.config.task if own else get_task(task)
    loaded = load_tokenizer(tokenizer) if tokenizer else session.tokenizer
    limit = session.config.limit if own else None
    split = load_split(chosen, data or session.data_source, chosen.eval_splits[0], limit=limit)
    longest = session.recipe.export.max_length
    encoded = encode(split, chosen, loaded, longest)
    largest = max(int(ids.max()) for ids in encoded.input_ids)
    if largest >= (count := about.shape["vocabulary"]):
        raise UserError(f"the tokenizer gives id {largest}, but {about.name} has {count} ids; give its own")
    edges = None
    if buckets and about.kind == "run" and (known := length_edges(session)):
        edges = known if known[-1] == longest else [*known, longest]  # what is longer has a profile, too
    elif buckets:
        shortest = min((each.length[0] for each in session.recipe.engine.profiles), default=1)
        edges = choose_edges(np.maximum(encoded.lengths, shortest), longest)
    splits, tokens, pad_id = [], int(encoded.lengths.sum()), int(loaded.pad_token_id)
    for size in batches:
        indexed = list(sorted_batches(encoded, size, pad_id=pad_id, edges=edges))  # the longest first
        lengths = [length for length, _ in sorted_rows(encoded.lengths, size, edges)]
        padded = [pad_batch(batch, to, pad_id) for (_, batch), to in zip(indexed, lengths, strict=True)]
        inputs = [{name: batch[name] for name in target.family.inputs} for batch in padded]
        rows = [len(index) for index, _ in indexed]
        splits.append(BatchedSplit(chosen.name, size, inputs, rows, encoded.rows, tokens, bucketed=buckets))
    return tuple(splits)
