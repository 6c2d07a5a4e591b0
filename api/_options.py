"""Options of every command and of the function that does the same: said once, in the order of `--help`."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import PositiveInt, field_validator

from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.quantize.recipe.sections import Training
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import BackendChoice
from qdqbench.quantize.utils.names import DEFAULT_RECIPE
from qdqbench.quantize.utils.options import Duration, Options
from qdqbench.quantize.utils.schema import field
from qdqbench.quantize.utils.system.process import invocation
from qdqbench.quantize.utils.trackers import TrackerName

if TYPE_CHECKING:
    from qdqbench.quantize.models.identity import Pooling
    from qdqbench.quantize.pipeline.session import RunConfig
    from qdqbench.quantize.recipe.schema import Recipe
    from qdqbench.quantize.tasks.task import Task

MIN_ROWS = 4  # train rows that can be divided
REVISION = "Branch, tag or commit of a hub model (default: its default branch)."
POSITIONAL: Any = {"positional": True}  # of a field that is an argument on the command line


def save_data(value: Any) -> Any:
    """Return a path as it is given; rows in memory are saved in `runs/data`, and theirs is returned."""
    if value is None or isinstance(value, str | os.PathLike):
        return value
    from qdqbench.quantize.pipeline.ownership import RUNS
    from qdqbench.quantize.tasks.data.files import save_rows

    return save_rows(value, RUNS / "data")


class PoolingOptions(Options):
    """A plain encoder as an embedding model."""

    pooling: Literal["mean", "cls", "last"] | None = field(
        "Pooling that turns an encoder into an embedder.", default=None
    )
    normalize: bool = field("With --pooling: scale embeddings to length 1.", default=False)

    def find_pooling(self) -> "Pooling | None":
        """Return the pooling that is asked for; normalization alone is a `UserError`."""
        from qdqbench.quantize.models.identity import Pooling

        if self.pooling is None and self.normalize:
            raise UserError("--normalize belongs to --pooling; give both")
        return Pooling(mode=self.pooling, normalize=self.normalize) if self.pooling else None


class TaskOptions(Options):
    """The model, and the task with its data."""

    model: str | None = field("Model folder or hub id (default: the built-in BERT).", default=None)
    task: str | None = field(
        "GLUE task, embed, multi-label, tokens, qa, squad, or any name (default: that of your own --data).",
        default=None,
    )
    data: str = field(
        "hub or hub:OWNER/NAME, with :CONFIG and @REVISION; a folder; or a file with all samples.",
        default="hub",
    )
    revision: str | None = field(REVISION, default=None)
    text_column: list[str] | None = field("Text column (default: text); two for pairs.", default=None)
    label_column: str | None = field("Label column (default: label); a,b: columns of 0 and 1.", default=None)
    num_labels: int | None = field("Classes (default: counted); 1 is regression.", default=None, ge=1)
    metric: list[str] | None = field("Metric of your data; repeatable, the first is primary.", default=None)

    _save_data = field_validator("data", mode="before")(save_data)

    @field_validator("model", mode="before")
    @classmethod
    def _refuse_object(cls, value: Any) -> Any:
        if hasattr(value, "save_pretrained"):
            raise ValueError("is in memory; save it and its tokenizer, and give the folder")
        return value

    def find_task(self) -> "Task":
        """Return the task, without model and task the built-in BERT's; errors as `tasks.task.get_task`."""
        from qdqbench.quantize.tasks.data.load import count_classes, has_label_lists
        from qdqbench.quantize.tasks.kinds.multilabel import MULTI_LABEL
        from qdqbench.quantize.tasks.task import DEFAULT_TEXT, EMBEDDED, KNOWN, find_nearest, get_task

        name, count, columns = self.task, self.num_labels, self.text_column or ()
        own = self.data != "hub" or bool(columns)
        slip = name and find_nearest(name)
        if name is None and own:
            stem = re.sub(r"[^\w.-]+", "-", Path(self.data).resolve().stem)
            name = f"own-{stem}" if stem in KNOWN else stem
        if name is not None and own and not columns and not slip:
            columns = [DEFAULT_TEXT]
        if (self.model is None) != (name is None):
            raise UserError(
                "--model and --task belong together; give both, or --model and --data of your own, or none "
                "for the built-in BERT"
            )
        if name is None:
            for option in ("label_column", "num_labels", "metric", "pooling"):
                if getattr(self, option, None) is not None:
                    raise UserError(f"--{option.replace('_', '-')} belongs to --model; give that too")
            return EMBEDDED
        kind = None
        if columns and name not in KNOWN:
            counted = get_task(name, text_columns=columns, label_column=self.label_column, num_labels=2)
            if has_label_lists(counted, self.data):
                kind = MULTI_LABEL
            elif count is None:
                count = count_classes(counted, self.data, self._count_outputs())
        return get_task(
            name,
            text_columns=columns,
            label_column=self.label_column,
            num_labels=count,
            metrics=self.metric or (),
            kind=kind,
        )

    def _count_outputs(self) -> int | None:
        """Return the number of outputs of a model whose head is kept."""
        return None


class FolderOptions(Options):
    """The folder that is written."""

    out: Path | None = field("Output folder (default: in runs/, by command, model and task).", default=None)
    overwrite: bool = field("Start over in a used --out; what it holds moves to OUT.old.", default=False)


class SetOptions(Options):
    """Fields of recipes."""

    set: dict[str, Any] | None = field("Recipe field, as calibration.samples=256; repeatable.", default=None)

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

        names = {"max_length", "backend", "target", "shapes"}
        return adapt_recipe(recipe, fields=self.set, **self.model_dump(include=names))


class RecipeOptions(SetOptions, FolderOptions, PoolingOptions, TaskOptions):
    """A recipe on a model and task."""

    max_length: int | None = field(
        "Maximum sequence length in tokens; optimization profiles follow (default: the recipe's).",
        default=None,
        ge=8,
    )
    backend: BackendChoice | None = field("Runtime of the engine (default: the recipe's).", default=None)
    target: list[str] | None = field(
        "Compute capability to build for, as 8.0; with backend cuda several (default: the GPU here, or all).",
        default=None,
    )
    prompt: list[str] | None = field(
        "Prompt before each text of an embedder: a name that the model knows, or a text; twice for pairs.",
        default=None,
    )
    batch_size: int = field("Batch size of evaluations.", default=32, ge=1)
    seed: int = field("Seed of everything random: samples, bootstrap, built-in BERT.", default=0, ge=0)

    def find_recipe(self, name: str | None) -> "Recipe":
        """Return the recipe for the model; errors are those of `recipe.schema.find_recipe` and `adapt`.

        Without a name it is the one to start with here.
        """
        from qdqbench.quantize.recipe.schema import find_recipe

        return self.adapt(find_recipe(name or self.find_start(), self.model, self.revision))

    def find_start(self) -> str:
        """Return the recipe that `recipes list` stars for the model's family and the backend here."""
        from qdqbench.quantize.engine.backend import preferred_backend
        from qdqbench.quantize.lint.machines import explain_kernels
        from qdqbench.quantize.models.families.known import BERT, family_of
        from qdqbench.quantize.models.load import load_config
        from qdqbench.quantize.recipe.schema import load_recipe
        from qdqbench.quantize.recipe.shipped import backends_of, choose_start

        config = load_config(self.model, self.revision) if self.model else None
        family = family_of(config) if config else BERT
        starts, backend = choose_start(family), preferred_backend(self.backend or "auto")
        if config and self.backend in (None, "auto") and "cuda" in starts:
            best = load_recipe(f"{family.name}-{starts['cuda']}")
            backend = "cuda" if explain_kernels(best, family.name, config) else backend
        return starts.get(backends_of(backend), DEFAULT_RECIPE)

    def _count_outputs(self) -> int | None:
        from qdqbench.quantize.models.identity import has_pooling
        from qdqbench.quantize.models.load import load_config

        if self.model is None or self.pooling or has_pooling(self.model, self.revision):
            return 1  # embeddings of pairs have scores
        return int(load_config(self.model, self.revision).num_labels)

    def config(self, recipe: "Recipe") -> "RunConfig":
        """Return the configuration of a run; `UserError`s as `find_task`, and where options do not fit."""
        from qdqbench.quantize.models.identity import choose_prompts, has_pooling
        from qdqbench.quantize.models.load import read_class_names
        from qdqbench.quantize.pipeline.session import RunConfig
        from qdqbench.quantize.tasks.data.load import add_label_values
        from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION
        from qdqbench.quantize.tasks.task import score_embeddings, with_classes

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
                task = score_embeddings(task, self.metric or (), model)
        if model is not None and task.kind.embeds:
            prompts = choose_prompts(model, self.revision, self.prompt or (), len(task.text_columns))
            task = task.model_copy(update={"prompts": prompts})
        elif self.prompt:
            raise UserError("--prompt is of embedding models; drop it")
        task = task.model_copy(update={"trained": recipe.qat is not None})
        values = self.model_dump(include={"model", "revision", "data", "batch_size", "seed", "limit"})
        return RunConfig(recipe=recipe, task=task, pooling=pooling, command=invocation(), **values)


class EvaluationOptions(RecipeOptions):
    """A recipe that is evaluated."""

    limit: int | None = field("Evaluate on this many samples; the report warns.", default=None, ge=1)


class TrackerOptions(Options):
    """An experiment tracker."""

    report_to: TrackerName | None = field("Tracker of the training log and the results.", default=None)


class QatOptions(TrackerOptions, EvaluationOptions):
    """Train with quantization, then continue to engine and report; on one GPU or many."""

    shapes: Literal["auto"] | None = field("auto: profiles for the data's lengths.", default=None)


class RunOptions(QatOptions):
    """Quantize, export, build, verify and evaluate a model, and write the report."""

    until: str | None = field("Last stage, or evaluate for all evaluations; resumable.", default=None)


class AutoOptions(EvaluationOptions):
    """Find a recipe that meets your limits: try shipped ones, calibration, FP16 fallbacks, search, QAT."""

    recipe: list[str] | None = field(
        "Recipes to start with (default: the one that `recipes list` stars, then int8-linears).",
        default=None,
        json_schema_extra=POSITIONAL,
    )
    budget: Duration = field(
        "Time for all steps, such as 90s, 30m or 2h; those that do not fit are left out.",
        default="30m",
        validate_default=True,
    )
    max_drop: float = field(
        "Largest drop of the metric to accept beyond noise; 0.005 is half a point.", default=0.005, ge=0, le=1
    )
    min_speedup: float | None = field("Least speed-up over the backend without INT8.", default=None, gt=0)
    samples: int = field("Train rows to choose proposals on; none is used to calibrate.", default=512, ge=32)
    trials: int = field("Largest number of recipes that the search tries.", default=24, ge=8)
    batch: int = field("Batch size at which latency is measured.", default=32, ge=1)
    length: int | None = field("Tokens for latency (default: 128 or the recipe's).", default=None, ge=1)


class SearchCommandOptions(EvaluationOptions, SearchOptions):
    """Find the recipe for your model, data and machine: accuracy against latency, confirmed on validation."""


class SensitivityOptions(RecipeOptions):
    """Find the layer that costs the accuracy: each alone in INT8, then all but it; write a recipe."""

    samples: int = field("Train rows to measure on.", default=512, ge=2)


class CalibrationOptions(EvaluationOptions):
    """Compare calibration methods in one table; write the recipe with the best one."""

    method: list[str] | None = field(
        "max, percentile/P, mse, entropy, or reconstruction, which trains; repeatable (default: all that do "
        "not train).",
        default=None,
    )
    smoothing: list[str] | None = field("none, gain or an alpha (default: none and 0.65).", default=None)
    samples: int = field("Train rows to compare on.", default=1024, ge=2)


class TrainingOptions(FolderOptions, TaskOptions, Training):
    """Fine-tunings over seeds."""

    patience: int = field("Evaluations without gain that end the training; 0: never.", default=5, ge=0)
    seeds: int = field("Number of runs; their seeds are --seed, --seed + 1 and so on.", default=1, ge=1)
    limit: int | None = field("Number of train rows; the report warns.", default=None, ge=MIN_ROWS)

    @property
    def training(self) -> Training:
        """Return the settings of each run."""
        values = self.model_dump(include={*Training.model_fields})
        return Training(**values | {"patience": self.patience or None})


class FinetuneOptions(TrackerOptions, TrainingOptions):
    """Fine-tune an encoder: the FP32 baseline of a task, over seeds, on one GPU or many."""

    max_length: int = field("Maximum sequence length in tokens.", default=128, ge=8)
    keep_head: bool = field("Start from the model's own classifier.", default=False)


class StudyOptions(SetOptions, TrainingOptions):
    """Measure FP32, PTQ and QAT over seeds: mean and standard deviation of a task, from a base encoder."""

    recipe: list[str] = field("Shipped names or YAML files, with QAT.", json_schema_extra=POSITIONAL)
    seeds: int = field("Number of fine-tunings, each with PTQ and QAT.", default=3, ge=1)


class StageOptions(Options):
    """A run directory."""

    folder: Path = field("Run directory.", json_schema_extra=POSITIONAL)


class ReportOptions(StageOptions):
    """Write results.json, report.md and report.html."""

    fp16: bool = field("Evaluate the FP16 twin too.", default=False)


class CompareOptions(FolderOptions):
    """Compare runs: accuracy on the same samples, changed predictions, speed, size and layers."""

    runs: list[Path] = field("Run directories, two or more.", json_schema_extra=POSITIONAL)


class DeployOptions(Options):
    """Write a finished run for deployment: graphs, engine, tokenizer, card, scripts without qdqbench."""

    run: Path = field("Run directory.", json_schema_extra=POSITIONAL)
    out: Path | None = field("Folder for copies (default: RUN/deploy).", default=None)
    fp32: bool = field("FP32 twin as onnx/model.onnx.", default=False)


class PushOptions(Options):
    """Write the deploy folder of a run whose gate passed, and upload it to the Hugging Face Hub."""

    run: Path = field("Run directory.", json_schema_extra=POSITIONAL)
    repository: str = field("Repository on the Hub, OWNER/NAME.", json_schema_extra=POSITIONAL)
    private: bool = field("Private repository.", default=False)
    create_pr: bool = field("Pull request, no commit.", default=False)
    fp32: bool = field("FP32 twin as onnx/model.onnx.", default=False)


class TritonOptions(Options):
    """Write a run as a model repository of NVIDIA Triton, with files to deploy it."""

    run: Path = field("Run directory.", json_schema_extra=POSITIONAL)
    out: Path = field("Folder to create.")
    name: str | None = field("Name of the model in Triton (default: the run's folder).", default=None)


class ListOptions(Options):
    """List the shipped recipes with measured accuracy and speed, and which to start with."""

    model: str | None = field("Folder or hub id; list only what fits it.", default=None)


class ShowOptions(Options):
    """Print a recipe as YAML."""

    resolved: bool = field("Write every default out.", default=False)
    model: str | None = field("Folder or hub id; its family completes a name.", default=None)


class ValidateOptions(Options):
    """Check recipe files without loading a model."""

    recipe: list[str] = field("Shipped names or YAML files.", json_schema_extra=POSITIONAL)


class CheckOptions(Options):
    """Options of `check`."""

    recipe: str | None = field("Recipe: which layers must be in INT8 (default: the run's).", default=None)
    allow: list[str] | None = field("Finding to leave out, as quantized-residual; repeatable.", default=None)


class CheckCommandOptions(CheckOptions):
    """Check any ONNX file: what will run in INT8, and what an engine would refuse or get wrong."""

    target: Path = field("ONNX file of any origin, or run directory.", json_schema_extra=POSITIONAL)
    all: bool = field("List every place; equal findings are one row otherwise.", default=False)


class DiagnoseOptions(Options):
    """Find why INT8 is slow, wrong or missing: files of any origin, read together, worst finding first."""

    files: list[Path] = field(
        "Run directory, or files of one build: ONNX, log, layers, profile, engine, cache; - is stdin.",
        json_schema_extra=POSITIONAL,
    )
    load_engine: bool = field("Load the engine to read its layers, if you trust it.", default=False)


class InspectOptions(Options):
    """Show the kernel and datatypes of each ONNX layer: INT8 against the recipe, attention, time."""

    target: Path = field("Run directory, .engine file or saved inspector JSON.", json_schema_extra=POSITIONAL)
    onnx: Path | None = field("ONNX file that the engine was built from.", default=None)
    recipe: str | None = field("Recipe to check the engine against (default: the run's).", default=None)
    profile: str | None = field("Kernel times: saved JSON (name, ms), or gpu or cpu: measured.", default=None)
    batch: int | None = field("With --profile gpu or cpu: batch size.", default=None, ge=1)
    length: int | None = field("With --profile gpu or cpu: tokens.", default=None, ge=1)
    all: bool = field("List every kernel; equal kernels are one row otherwise.", default=False)
    bisect: bool = field("Find the first tensor that goes wrong.", default=False)


class DoctorOptions(Options):
    """Show what this machine can do: libraries, backends, known hazards, and what to install."""

    backend: BackendChoice | None = field("Exit with status 3 if this backend cannot run.", default=None)
    offline: bool = field("Do not check whether the hub is reachable.", default=False)
    report: bool = field("Print Markdown for a bug report, without names of users or folders.", default=False)


class NewRecipeOptions(Options):
    """Write a recipe for a model of any type, and list what was recognized in it and what was not."""

    model: str = field("Folder or hub id; its configuration is read, no weights.")
    revision: str | None = field(REVISION, default=None)
    out: Path | None = field("Recipe file (default: NAME.yaml here).", default=None)


class CacheRecipeOptions(NewRecipeOptions):
    """Write a recipe with the amax of a calibration cache, for the tensors that can be matched."""

    cache: Path = field("Calibration cache of TensorRT 5 to 10.", json_schema_extra=POSITIONAL)
    onnx: Path = field("ONNX file that was calibrated.")


class FixCommandOptions(TaskOptions):
    """Rewrite what keeps INT8 from working in an ONNX file, and prove it: outputs, check, layer tables.

    Samples come from --inputs, or from --data with --model and --task. By default they are random tokens.
    """

    onnx_file: Path = field("ONNX file of any origin.", json_schema_extra=POSITIONAL)
    out: Path = field("File to write.")
    compute: Literal["fp16", "keep"] = field("Precision of the rest, if the file is FP32.", default="fp16")
    weights: Literal["channel", "factored"] = field(
        "Form of weight scales; factored is faster in TensorRT-RTX.", default="channel"
    )
    inputs: Path | None = field("Samples to compare and calibrate on (.npz, array per input).", default=None)
    samples: int = field("Rows of the train split, with --model and --task.", default=128, ge=1)
    seed: int = field("Seed of random inputs, or of the drawn samples.", default=0, ge=0)
    max_error: float = field("Largest relative error against the file without Q/DQ.", default=0.1, ge=0)
    no_engine: bool = field("Do not build engines of both files to compare them.", default=False)


class BenchOptions(SetOptions, FolderOptions, PoolingOptions):
    """Measure INT8 against other engines, PyTorch and other quantizers: interleaved, verified, GPU or CPU."""

    model: str | None = field("Model folder, or a size with random weights, such as bert-base.", default=None)
    set: dict[str, Any] | None = field(
        "With --model: recipe field by path, like export.gelu=tanh; repeatable. Runs keep their recipe.",
        default=None,
    )
    recipe: str | None = field(f"With --model: name or YAML file (default: {DEFAULT_RECIPE}).", default=None)
    extra_recipe: list[str] | None = field("With --model: also measure it; repeatable.", default=None)
    batch: list[PositiveInt] | None = field(
        "Batch size; repeatable (default: 1, 8, 32, 128; on a CPU 1, 8).", default=None
    )
    length: list[PositiveInt] | None = field("Tokens per sequence; repeatable (default: 128).", default=None)
    dataset: str | None = field("Task whose evaluation split is timed; --length adds shapes.", default=None)
    dataset_batch: list[PositiveInt] | None = field("Batch size of --dataset; repeatable.", default=None)
    data: str | None = field("Data of --dataset (default: the run's).", default=None)
    tokenizer: str | None = field("Tokenizer for --dataset, if --model is a published size.", default=None)
    streams: list[PositiveInt] | None = field("Concurrent inferences; repeatable.", default=None)
    threads: int | None = field("Threads of a system on a CPU (default: its cores).", default=None, ge=1)
    rounds: int | None = field("Interleaved rounds (default: 12, on a CPU 6).", default=None, ge=1)
    duration: float = field("Seconds of latency per system and shape, over all rounds.", default=1.0, gt=0)
    iterations: int | None = field("Inferences per round, instead of --duration.", default=None, ge=1)
    baselines: bool = field(
        "Also measure PyTorch, torch.compile, unpadded FP16 and FP8, and other quantizers.", default=True
    )
    fp32: bool = field("Also measure the FP32 engine.", default=True)
    cost_per_hour: float | None = field(
        "Price of this machine an hour: also report the cost of a million texts.", default=None, gt=0
    )
    compile_seconds: float = field("Limit of each torch.compile in seconds.", default=90.0, gt=0)
    engine_shapes: Literal["both", "exact", "recipe"] = field(
        "Shapes of engines on a GPU: the recipe's, exactly each shape, or both.", default="both"
    )
    cpu: bool = field("Measure on the CPU, even if there is a GPU.", default=False)
    keep_engines: bool = field("Leave the engines for inspect or the next bench.", default=False)
    build_only: bool = field("Only export, build and compile, for a later bench; on a GPU.", default=False)
    exclude: list[str] | None = field("System to leave out, by its name in bench.json.", default=None)
    seed: int = field("Seed of weights, inputs and bootstrap.", default=0, ge=0)
    _save_data = field_validator("data", mode="before")(save_data)
