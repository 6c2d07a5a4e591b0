"""Options of every command and of the function that does the same: said once, in the order of `--help`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field, PositiveInt, field_validator

from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.quantize.recipe.training import Training
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import BackendChoice
from qdqbench.quantize.utils.names import DEFAULT_RECIPE
from qdqbench.quantize.utils.options import Duration, Options

if TYPE_CHECKING:
    from qdqbench.quantize.models.pooling import Pooling
    from qdqbench.quantize.pipeline.session import RunConfig
    from qdqbench.quantize.recipe.schema import Recipe
    from qdqbench.quantize.tasks.task import Task

MIN_ROWS = 4  # train rows that can be divided
REVISION = "Branch, tag or commit of a hub model; none: its default branch."
POSITIONAL: Any = {"positional": True}  # of a field that is an argument on the command line


class PoolingOptions(Options):
    """A plain encoder as an embedding model."""

    pooling: Literal["mean", "cls", "last"] | None = Field(
        default=None, description="Pooling of a plain encoder as embedding model."
    )
    normalize: bool = Field(default=False, description="Embeddings of length 1; with --pooling.")

    def find_pooling(self) -> "Pooling | None":
        """Return the pooling that is asked for.

        Raises:
            UserError: normalization alone.
        """
        from qdqbench.quantize.models.pooling import Pooling

        if self.pooling is None and self.normalize:
            raise UserError("--normalize belongs to --pooling; give both")
        return Pooling(mode=self.pooling, normalize=self.normalize) if self.pooling else None


class TaskOptions(Options):
    """The model, and the task with its data."""

    model: str | None = Field(default=None, description="Model folder or hub id; none: the embedded default.")
    task: str | None = Field(
        default=None,
        description="GLUE task, embed, tokens, qa, squad, squad_v2, or any name with --text-column.",
    )
    data: str = Field(
        default="hub",
        description="hub or hub:OWNER/NAME, with :CONFIG and @REVISION; a folder; or a file with all "
        "samples.",
    )
    revision: str | None = Field(default=None, description=REVISION)
    text_column: list[str] | None = Field(
        default=None, description="Text column of your own data; twice for pairs."
    )
    label_column: str | None = Field(default=None, description="Label column of your own data.")
    num_labels: int | None = Field(
        default=None, ge=1, description="Classes of your own data; 1 is regression."
    )
    metric: list[str] | None = Field(
        default=None, description="Metrics of your own data; repeatable, the first decides."
    )

    def find_task(self) -> "Task":
        """Return the task; without model and task that of the embedded default.

        Raises:
            UserError: a model without a task, a task without a model, or as `tasks.task.get_task`.
        """
        from qdqbench.quantize.tasks.task import EMBEDDED, get_task

        if (self.model is None) != (self.task is None):
            raise UserError(
                "--model and --task belong together; give both, or neither for the embedded default"
            )
        if self.task is None:
            return EMBEDDED
        return get_task(
            self.task,
            text_columns=self.text_column or (),
            label_column=self.label_column,
            num_labels=self.num_labels,
            metrics=self.metric or (),
        )


class FolderOptions(Options):
    """The folder that is written."""

    out: Path | None = Field(
        default=None,
        description="Output folder; none: one in runs/, named after command, model, recipe and task.",
    )
    overwrite: bool = Field(
        default=False, description="Start over in a used --out; what it holds moves to OUT.old."
    )


class SetOptions(Options):
    """Fields of recipes."""

    set: dict[str, Any] | None = Field(
        default=None, description="Recipe field by its path, such as calibration.samples=256; repeatable."
    )

    @field_validator("set", mode="before")
    @classmethod
    def _parse_fields(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        pairs = [str(text).partition("=") for text in value]
        if wrong := next((path for path, equals, _ in pairs if not (path and equals)), None):
            raise ValueError(f"{wrong} has no value; give a path and a value, as in calibration.samples=256")
        try:
            return {path.strip(): yaml.safe_load(text) for path, _, text in pairs}
        except yaml.YAMLError as error:
            raise ValueError(f"no YAML value: {' '.join(str(error).split())[:200]}") from error

    def adapt(self, recipe: "Recipe") -> "Recipe":
        """Return a recipe with what was asked for; errors are those of `recipe.schema.adapt_recipe`."""
        from qdqbench.quantize.recipe.schema import adapt_recipe

        names = {"max_length", "backend", "shapes"}
        return adapt_recipe(recipe, fields=self.set, **self.model_dump(include=names))


class RecipeOptions(SetOptions, FolderOptions, PoolingOptions, TaskOptions):
    """A recipe on a model and task."""

    max_length: int | None = Field(
        default=None, ge=8, description="Tokens of a sample, which profiles follow; none: the recipe's."
    )
    backend: BackendChoice | None = Field(
        default=None, description="Runtime of the engine; none: the recipe's."
    )
    batch_size: int = Field(default=32, ge=1, description="Batch size of evaluations.")
    seed: int = Field(
        default=0, ge=0, description="Seed of everything random: samples, bootstrap, embedded default."
    )

    def find_recipe(self, name: str) -> "Recipe":
        """Return the recipe for the model; errors are those of `recipe.schema.find_recipe` and `adapt`."""
        from qdqbench.quantize.recipe.schema import find_recipe

        return self.adapt(find_recipe(name, self.model, self.revision))

    def config(self, recipe: "Recipe", command: str) -> "RunConfig":
        """Return the configuration of a run.

        Raises:
            UserError: as `find_task`, a revision without a model, or an embedding model and a task that
                cannot judge it.
        """
        from qdqbench.quantize.models.identity import has_pooling
        from qdqbench.quantize.models.load import read_class_names
        from qdqbench.quantize.pipeline.session import RunConfig
        from qdqbench.quantize.tasks.rows import add_label_values
        from qdqbench.quantize.tasks.task import score_embeddings, with_classes
        from qdqbench.quantize.tasks.types.classification import CLASSIFICATION

        task, pooling, model = self.find_task(), self.find_pooling(), self.model
        if model is None:
            if self.revision is not None:
                raise UserError(f"--revision {self.revision} belongs to --model with a hub id; give that too")
        else:
            if task.kind.names_classes:
                task = with_classes(task, read_class_names(model, self.revision, task.kind))
            if task.kind is CLASSIFICATION:
                task = add_label_values(task, self.data, read_class_names(model, self.revision, task.kind))
            if pooling or has_pooling(model, self.revision):
                task = score_embeddings(task, self.metric or ())
        names = {"model", "revision", "data", "batch_size", "seed", "limit"}
        values = self.model_dump(include=names)
        return RunConfig(recipe=recipe, task=task, pooling=pooling, command=command, **values)


class EvaluationOptions(RecipeOptions):
    """A recipe that is evaluated."""

    limit: int | None = Field(
        default=None, ge=1, description="Evaluate on this many samples; the report warns."
    )


class QatOptions(EvaluationOptions):
    """Options of `qat`."""

    shapes: Literal["auto"] | None = Field(
        default=None,
        description="auto: profiles of the lengths that the evaluation data has; none: the recipe's.",
    )


class RunOptions(QatOptions):
    """Options of `run`."""

    until: str | None = Field(
        default=None,
        description="Stage to stop after, or evaluate for all evaluations; the others can follow later.",
    )


class AutoOptions(EvaluationOptions):
    """Options of `auto`."""

    recipe: list[str] | None = Field(
        default=None,
        description="Recipes to start with. None: int8-attention, with --min-speedup on a GPU "
        "int8-residual-fused, and int8-linears.",
        json_schema_extra=POSITIONAL,
    )
    budget: Duration = Field(
        default="30m",
        validate_default=True,
        description="Time for all steps, such as 90s, 30m or 2h; those that do not fit are left out.",
    )
    max_drop: float = Field(
        default=0.005,
        ge=0,
        le=1,
        description="Largest drop of the primary metric, or noise: 0.005 is half a percentage point.",
    )
    min_speedup: float | None = Field(
        default=None,
        gt=0,
        description="Lowest speed-up over the engine without INT8 of the same backend, a factor.",
    )
    samples: int = Field(
        default=512, ge=32, description="Train rows that proposals are chosen on; none of them calibrates."
    )
    trials: int = Field(default=24, ge=8, description="Recipes that the search tries at most.")
    batch: int = Field(default=32, ge=1, description="Batch size of the latency.")
    length: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per sequence of the latency; none: 128, or what the recipe takes.",
    )


class SearchCommandOptions(RecipeOptions, SearchOptions):
    """Options of `search`."""


class SensitivityOptions(RecipeOptions):
    """Options of `sensitivity`."""

    samples: int = Field(default=512, ge=2, description="Train rows to measure on.")


class CalibrationOptions(EvaluationOptions):
    """Options of `compare-calibration`."""

    method: list[str] | None = Field(
        default=None, description="max, percentile/P, mse or entropy; repeatable. None: all of them."
    )
    smoothing: list[str] | None = Field(
        default=None, description="none, gain or an alpha; repeatable. None: none and 0.65."
    )
    samples: int = Field(default=1024, ge=2, description="Train rows to compare on.")


class TrainingOptions(FolderOptions, TaskOptions, Training):
    """Fine-tunings over seeds."""

    patience: int = Field(default=5, ge=0, description="Evaluations without gain that end it; 0: none do.")
    seeds: int = Field(default=1, ge=1, description="Number of runs, with seeds from --seed on.")
    limit: int | None = Field(default=None, ge=MIN_ROWS, description="Train rows; the report warns.")

    @property
    def training(self) -> Training:
        """Return the settings of each run."""
        values = self.model_dump(include={*Training.model_fields})
        return Training(**values | {"patience": self.patience or None})


class FinetuneOptions(TrainingOptions):
    """Options of `finetune`."""

    max_length: int = Field(default=128, ge=8, description="Tokens of a sample.")
    keep_head: bool = Field(default=False, description="Start from the model's own classifier.")


class StudyOptions(SetOptions, TrainingOptions):
    """Options of `study`."""

    seeds: int = Field(default=3, ge=1, description="Number of fine-tunings, each with PTQ and QAT.")


class CheckOptions(Options):
    """Options of `check`."""

    recipe: str | None = Field(
        default=None, description="Recipe to hold the quantized set to; none: that of the run."
    )
    allow: list[str] | None = Field(
        default=None, description="Code of findings to leave out, such as quantized-residual; repeatable."
    )


class InspectOptions(Options):
    """Options of `inspect`."""

    onnx: Path | None = Field(default=None, description="ONNX file that the engine was built from.")
    recipe: str | None = Field(default=None, description="Recipe to hold the engine to; none: the run's.")
    profile: str | None = Field(
        default=None, description="Kernel times: saved JSON (name, ms), or gpu or cpu to measure here."
    )
    batch: int | None = Field(
        default=None, ge=1, description="With --profile gpu or cpu: batch size; none: the optimum."
    )
    length: int | None = Field(
        default=None, ge=1, description="With --profile gpu or cpu: tokens; none: the optimum."
    )
    all: bool = Field(default=False, description="List every kernel, not one row for equal ones.")
    bisect: bool = Field(default=False, description="Find the first tensor that goes wrong.")


class DoctorOptions(Options):
    """Options of `doctor`."""

    backend: BackendChoice | None = Field(default=None, description="Exit with 3 where it cannot run.")
    offline: bool = Field(default=False, description="Do not ask whether the hub is there.")
    report: bool = Field(
        default=False, description="Markdown for a bug report, without names of users or folders."
    )


class NewRecipeOptions(Options):
    """Options of `recipes new`."""

    model: str = Field(description="Folder or hub id; its configuration is read, no weights.")
    revision: str | None = Field(default=None, description=REVISION)
    out: Path | None = Field(default=None, description="Recipe file; none: NAME.yaml here.")


class CacheRecipeOptions(NewRecipeOptions):
    """Options of `recipes from-cache`."""

    onnx: Path | None = Field(
        default=None, description="ONNX file that was calibrated; none: names of an export here."
    )


class FixCommandOptions(TaskOptions):
    """Options of `fix`."""

    out: Path = Field(description="File to write.")
    compute: Literal["fp16", "keep"] = Field(
        default="fp16", description="Precision of what is not INT8, in a file that is all FP32."
    )
    weights: Literal["channel", "factored"] = Field(
        default="channel", description="Scales of weights; TensorRT-RTX runs factored ones faster."
    )
    inputs: Path | None = Field(
        default=None,
        description="Samples (.npz, one array an input): compared on, and calibrate what has no scale.",
    )
    samples: int = Field(default=128, ge=1, description="Rows of the train split, with --model and --task.")
    seed: int = Field(default=0, ge=0, description="Seed of random inputs, or of the drawn samples.")
    max_error: float = Field(
        default=0.1, ge=0, description="Largest relative error of outputs to the file without Q/DQ."
    )
    no_engine: bool = Field(default=False, description="Build no engine before and after.")


class BenchOptions(SetOptions, FolderOptions, PoolingOptions):
    """Options of `bench`."""

    model: str | None = Field(
        default=None,
        description="Model folder, or a published size with random weights, such as bert-base.",
    )
    set: dict[str, Any] | None = Field(
        default=None,
        description="With --model: field of its recipes by its path, such as engine.backend=openvino; "
        "repeatable. A run keeps the recipe that it was built with.",
    )
    recipe: str | None = Field(
        default=None, description=f"With --model: name or YAML file; none: {DEFAULT_RECIPE}."
    )
    extra_recipe: list[str] | None = Field(
        default=None, description="With --model on a GPU: INT8 by this recipe too; repeatable."
    )
    batch: list[PositiveInt] | None = Field(
        default=None, description="Batch size; repeatable. None: 1, 8, 32, 128, on a CPU 1 and 8."
    )
    length: list[PositiveInt] | None = Field(
        default=None, description="Tokens per sequence; repeatable. None: 128."
    )
    dataset: str | None = Field(
        default=None,
        description="Task whose whole evaluation split is timed; other shapes if they are named.",
    )
    dataset_batch: list[PositiveInt] | None = Field(
        default=None, description="Batch size of --dataset; repeatable. None: 32."
    )
    data: str | None = Field(default=None, description="Data of --dataset; none: the run's.")
    tokenizer: str | None = Field(default=None, description="Tokenizer of --dataset for a built-in shape.")
    streams: list[PositiveInt] | None = Field(
        default=None, description="Concurrent inferences; repeatable. None: 1 and 2."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of a system on a CPU, all streams together; none: one for each core.",
    )
    rounds: int | None = Field(default=None, ge=1, description="Interleaved rounds. None: 12, on a CPU 6.")
    duration: float = Field(
        default=1.0, gt=0, description="Seconds of latency per system and shape, over all rounds."
    )
    iterations: int | None = Field(
        default=None, ge=1, description="Inferences per round, instead of --duration."
    )
    baselines: bool = Field(
        default=True, description="PyTorch, torch.compile, unpadded FP16 and other quantizers too."
    )
    fp32: bool = Field(default=True, description="FP32 engine too.")
    compile_seconds: float = Field(
        default=90.0,
        gt=0,
        description="Limit for each shape and mode of torch.compile; what takes longer is left out.",
    )
    engine_shapes: Literal["both", "exact", "recipe"] = Field(
        default="both", description="Shapes of engines on a GPU: the recipe's, exactly each shape, or both."
    )
    cpu: bool = Field(default=False, description="Measure on the CPU, even where a GPU is.")
    keep_engines: bool = Field(
        default=False, description="Leave the engines in the work folder, for inspect or the next bench."
    )
    build_only: bool = Field(
        default=False, description="Only export, build and compile, for a bench that follows; on a GPU."
    )
    exclude: list[str] | None = Field(
        default=None, description="System to leave out, by its name in bench.json; repeatable."
    )
    seed: int = Field(default=0, ge=0, description="Seed of weights, inputs and bootstrap.")
