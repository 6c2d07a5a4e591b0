"""One run: its configuration and folder, and the models and data that its stages share, loaded lazily."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.record import CalibrationRecord, read_record
from qdqbench.quantize.calibration.techniques.bias_correction import add_biases_temporarily
from qdqbench.quantize.engine.target import EngineTarget, choose_target
from qdqbench.quantize.models.families.known import require_family
from qdqbench.quantize.models.identity import Pooling, embedding_notes, model_fingerprint
from qdqbench.quantize.models.load import (
    is_large,
    load_matching_tokenizer,
    load_model,
    read_class_names,
    use_tanh_gelu,
)
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Calibration, Qat, Reconstruction
from qdqbench.quantize.tasks.data.encode import CalibrationBatches, encode
from qdqbench.quantize.tasks.data.load import load_split, require_order
from qdqbench.quantize.tasks.data.splits import Split, has_only_texts, read_split
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION
from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.tasks.kinds.tokens import is_named, read_label_names
from qdqbench.quantize.tasks.task import Task, check_model_fits
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.schema import Strict, read

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CONFIG = "run.json"
RECONSTRUCTION, QAT = "reconstruction", "qat"  # folders of trained models, and fields of a recipe
RECORD, CHECKPOINTS = "training.json", "checkpoints"  # of a training
LEAST_TEXTS = 4  # to reconstruct with, as some are held out


class RunConfig(Strict):
    """Inputs and options of a run; `run.json` in the run directory."""

    schema_version: Literal[1] = 1
    recipe: Recipe
    model: str | None  # folder or hub id; None: the built-in BERT
    task: Task
    revision: str | None = None  # of a hub model: branch, tag or commit; None: its default branch
    pooling: Pooling | None = None  # of a plain encoder that is measured as an embedding model
    calibrated: bool = False  # its scales are in `calibration.json` of the model's folder
    data: str  # "hub", "hub:OWNER/NAME", either with "@REVISION", or a folder
    limit: int | None = None  # evaluate on this many samples only
    batch_size: int = 32
    seed: int = 0
    command: str = "qdqbench run"


def read_config(folder: Path) -> RunConfig:
    path = folder / CONFIG
    if not path.is_file():
        beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
        there = sorted(str(each) for each in beside if (each / CONFIG).is_file())
        fix = f"start one with `qdqbench run --out {folder}`"
        raise UserError(
            f"{folder} is no run directory (it has no {CONFIG}); {fix}"
            + (f", or give one of {name_list(there)}" if there else "")
        )
    again = f"run the command that started it again with --out {folder}, which keeps its finished stages"
    return read(path, RunConfig, "run configuration", again)


def require_fit(recipe: Recipe, model: str, config: Any) -> None:
    recipe.model.describe()  # another recipe may have described this type since
    if recipe.calibration.softmax_scale == "row-max" and choose_target(recipe).backend != "cuda":
        raise UserError(
            "calibration.softmax_scale: row-max is for engines of backend cuda alone; give --backend cuda, "
            "or set it to min-error"
        )
    longest = require_family(recipe.name, recipe.model.family, model, config).positions(config)
    if recipe.export.max_length > longest:
        raise UserError(
            f"export.max_length is {recipe.export.max_length}, but model {model} has {longest} positions; "
            "give --max-length, or lower both export.max_length and engine.shapes.length in the recipe"
        )


@dataclass
class Session:
    config: RunConfig
    folder: Path
    notes: list[str] = field(default_factory=list)  # how data were read, what was calibrated
    warnings: list[str] = field(default_factory=list)  # what a reader of the report must know
    accelerator: "Accelerator | None" = None  # of several processes; None: made when it is needed
    before_training: Callable[[], None] = lambda: None  # the other processes wait for this
    sought_builder: bool = False  # what is missing to build an engine was told

    @property
    def recipe(self) -> Recipe:
        return self.config.recipe

    @functools.cached_property
    def target(self) -> EngineTarget:
        return choose_target(self.recipe)

    @property
    def calibration(self) -> Calibration:
        """Return the recipe's calibration section, for this engine's backend."""
        return self.recipe.calibration_for(self.target.backend)

    @property
    def computes_tanh(self) -> bool:
        return self.recipe.computes_tanh_on(self.target.backend)

    @property
    def model_name(self) -> str:
        return self.config.model or str(self.folder / "embedded" / "model")

    @property
    def data_source(self) -> str:
        return self.config.data if self.config.model else str(self.folder / "embedded" / "data")

    @functools.cached_property
    def model_sha256(self) -> str:
        return model_fingerprint(self.model_name, self.config.revision)

    @property
    def model_identity(self) -> list[Any]:
        """Return what tells its model from others, as JSON values: its files, and the pooling asked for."""
        return [self.model_sha256, self.config.pooling and self.config.pooling.model_dump()]

    @functools.cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return load_matching_tokenizer(self.model_name, self.config.revision, self.config.task.kind)

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    def new_model(self) -> "PreTrainedModel":
        task, revision, recipe = self.config.task, self.config.revision, self.recipe
        report_phase("loading the model")
        model = load_model(self.model_name, revision, task.kind, self.config.pooling)
        labels, kind = int(model.config.num_labels or 0), model.config.problem_type
        if recipe.qat and recipe.qat.distill.labels and task.kind.embeds:
            raise UserError(
                f"qat.distill.labels is {recipe.qat.distill.labels:g}, but embeddings learn from those of "
                "FP32 alone; set it to 0"
            )
        if task.kind.embeds:
            self._warn(embedding_notes(self.model_name, revision, recipe.export.max_length, task.prompts))
        notes = [f"texts begin with {prompt!r}" for prompt in dict.fromkeys(task.prompts)]
        if is_large(model):
            notes.append("word embeddings are FP16: in FP32 a graph would exceed 2 GiB")
        self.notes += [note for note in notes if note not in self.notes]
        require_fit(recipe, self.model_name, model.config)
        check_model_fits(task, model_labels=labels, problem_type=kind)
        return model

    def _warn(self, lines: Iterable[str]) -> None:
        self.warnings += [line for line in lines if line not in self.warnings]

    def new_int8_model(self) -> "PreTrainedModel":
        model = self.new_model()
        if self.computes_tanh:
            use_tanh_gelu(model, self.model_name)
        return model

    @functools.cached_property
    def fp32_model(self) -> "PreTrainedModel":
        return self.new_model()

    @contextmanager
    def fp32_shifted(self) -> Iterator["PreTrainedModel"]:
        """Give the FP32 model the shifts of calibration: the same answers, with INT8's hidden states."""
        shifts = [shift.added for shift in self.ptq_record.shifts.values()]
        with add_biases_temporarily(self.fp32_model, shifts):
            yield self.fp32_model

    @functools.cached_property
    def plan(self) -> Plan:
        model = self.fp32_model
        return resolve(self.recipe, module_table(model), model.base_model_prefix)

    def new_ptq_model(self) -> "PreTrainedModel":
        model = self.new_int8_model()
        ptq.restore(model, self.plan, self.ptq_record)
        return model

    def new_trained_model(self, training: str) -> "PreTrainedModel":
        """Return the fake-quant model after a training of the recipe, one of `recipe.trainings`."""
        name = str(self.folder / training / "model")
        report_phase("loading the model")
        model = load_model(name, kind=self.config.task.kind)
        if self.computes_tanh:
            use_tanh_gelu(model, name)
        ptq.restore(model, self.plan, read_record(self.folder / training / "calibration.json"))
        return model

    def new_start_model(self) -> "PreTrainedModel":
        """Return the fake-quant model that QAT starts from: after reconstruction where there is one."""
        return self.new_trained_model(RECONSTRUCTION) if self.recipe.reconstruction else self.new_ptq_model()

    @property
    def start_record(self) -> CalibrationRecord:
        """Return the record of the model that QAT starts from."""
        parts = [RECONSTRUCTION] * (self.recipe.reconstruction is not None)
        return read_record(self.folder.joinpath(*parts, "calibration.json"))

    @property
    def ptq_record(self) -> CalibrationRecord:
        return read_record(self.folder / "calibration.json")

    @property
    def record_path(self) -> Path:
        return self.folder.joinpath(*self.recipe.trainings[-1:], "calibration.json")

    @functools.cached_property
    def fake_quant_model(self) -> "PreTrainedModel":
        """Return the fake-quant model that is exported: after the recipe's last training, else after PTQ."""
        trainings = self.recipe.trainings
        return self.new_trained_model(trainings[-1]) if trainings else self.new_ptq_model()

    def split(self, name: str, *, limit: int | None, seed: int | None = None, labelled: bool = True) -> Split:
        task, source = self.config.task, self.data_source
        split = load_split(task, source, name, limit=limit, seed=seed, labelled=labelled)
        self.notes += [note for note in split.notes if note not in self.notes]
        self._warn(split.warnings)
        return split

    def calibration_split(self, samples: int, seed: int) -> Split:
        name, task = self.recipe.calibration.split, self.config.task
        texts = has_only_texts(task, self.data_source, name)
        labelled = not (task.kind.calibrates_unlabelled or texts)
        return self.split(name, limit=samples, seed=seed, labelled=labelled)

    def own_texts(self, source: str, seed: int, samples: int | None = None) -> Split:
        """Return a draw from other texts than those of the task: without labels, none empty or judged.

        UserError: fewer than four are left.
        """
        task, judged = self.config.task, set[tuple[str, ...]]()

        def texts_of(split: Split) -> list[tuple[str, ...]]:
            rows = zip(*(split.dataset[name] for name in task.text_columns), strict=True)
            return [
                tuple(" ".join(text.split() if isinstance(text, str) else text) for text in row)
                for row in rows
            ]

        for name in task.eval_splits:
            judged |= {*texts_of(self.split(name, limit=None, labelled=False))}
        split = load_split(task, source, task.train_split, seed=seed, labelled=False)
        words = [(number, texts) for number, texts in enumerate(texts_of(split)) if any(texts)]
        kept = [number for number, texts in words if texts not in judged]
        few = f"{split.rows} texts, {split.rows - len(words)} empty, {len(words) - len(kept)} evaluated on"
        if len(kept) < LEAST_TEXTS:
            raise UserError(f"{source} has {few}, which leaves {len(kept)}; give {LEAST_TEXTS} or more")
        if len(kept) < split.rows:
            self.notes.append(f"{source} has {few}; these are left out")
        kept = kept[:samples]
        return replace(split, dataset=split.dataset.select(kept), rows=len(kept))

    def calibration_batches(self) -> CalibrationBatches:
        settings, task = self.recipe.calibration, self.config.task
        split = self.calibration_split(settings.samples, settings.seed)
        longest = self.recipe.export.max_length
        return CalibrationBatches(split, task, self.tokenizer, longest, settings.batch_size, self.pad_id)

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Drop what the data give to note: the stage that calibrates notes it."""
        known = [*self.notes], [*self.warnings]
        try:
            yield
        finally:
            self.notes, self.warnings = known

    def require_inputs(self, *, calibrates: bool = True, evaluates: bool = True) -> None:
        """Raise `UserError` where model, recipe or data do not load or fit, before anything is written."""
        if self.config.model is None:
            return
        self.plan  # noqa: B018
        if self.recipe.reconstruction and not self.recipe.quantizes:
            raise UserError(f"recipe {self.recipe.name} quantizes nothing that reconstruction could train")
        if calibrates and self.recipe.quantizes and not self.config.calibrated:
            with self.unnoted():
                self.calibration_batches()
                trainings: list[Reconstruction | Qat | None] = [self.recipe.reconstruction, self.recipe.qat]
                for trains in trainings:
                    if trains and trains.texts:
                        self.own_texts(trains.texts, trains.seed)
        if evaluates:
            self.eval_splits  # noqa: B018

    @functools.cached_property
    def eval_splits(self) -> dict[str, tuple[Split, Encoded]]:
        task, splits = self.config.task, {}
        for name in task.eval_splits:
            report_phase(f"reading {name}")
            split = self.split(name, limit=self.config.limit)
            if task.kind is CLASSIFICATION:
                require_order(split, task, read_class_names(self.model_name, self.config.revision, task.kind))
            encoded = encode(split, task, self.tokenizer, self.recipe.export.max_length)
            splits[name] = split, encoded
            self._warn(encoded.warnings)
        return splits

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the model's classes; those of the data's where the model only numbers them."""
        config, task = self.config, self.config.task
        names = task.classes or tuple(read_class_names(self.model_name, config.revision, task.kind))
        if is_named(names):
            return names
        known = task.values
        if not known:
            with suppress(UserError):  # data that is not there any more names nothing
                dataset = read_split(task, self.data_source, task.eval_splits[0]).dataset
                known = read_label_names(dataset, task.label_column)
        return known if len(known) == len(names) else names

    @property
    def gold(self) -> dict[str, Any]:
        return {name: encoded.gold for name, (_, encoded) in self.eval_splits.items()}
