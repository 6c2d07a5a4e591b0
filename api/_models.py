"""A model in memory and the files made of it: calibrate, export, check."""

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qdqbench._options import CheckOptions, PoolingOptions, RunOptions
from qdqbench._progress import StageProgress, displayed
from qdqbench._samples import Batches, Samples, find_texts, list_samples
from qdqbench.eval.runs.results import Results
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant.quantizers import name_outputs
from qdqbench.quantize.calibration.record import (
    CalibrationRecord,
    describe_spread,
    read_record,
    trained_record,
    write_record,
)
from qdqbench.quantize.calibration.techniques import channel_splitting
from qdqbench.quantize.calibration.techniques.channel_splitting import ChannelSplit
from qdqbench.quantize.engine.backend import gpu_backend
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.graph.export import ExportSettings, trace, write_graph
from qdqbench.quantize.lint.check import CheckReport, check_file
from qdqbench.quantize.lint.inspect_target import find_checked_graph, recipe_modules
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.identity import has_pooling
from qdqbench.quantize.models.load import (
    load_config,
    load_model,
    load_tokenizer,
    prepare_model,
    use_tanh_gelu,
)
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.pipeline.ownership import identity_of, owned_folder
from qdqbench.quantize.pipeline.session import Session, require_fit
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe, dump_recipe, load_recipe
from qdqbench.quantize.report.coverage import share
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION
from qdqbench.quantize.tasks.kinds.embedding import PAIRS
from qdqbench.quantize.tasks.task import kind_of
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import DEFAULT_RECIPE, count_of
from qdqbench.quantize.utils.options import parse_options, path_of, take_options
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.schema import Shown
from qdqbench.quantize.utils.system.process import invoked_as
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    import pandas
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qdqbench.quantize.tasks.kinds.kind import TaskKind


SCALES, RECIPE = "calibration.json", "recipe.yaml"  # in a folder that `save_pretrained` wrote


@dataclass(frozen=True, repr=False)
class Quantized(Shown):
    """A fake-quant model with the record of its calibration."""

    model: "PreTrainedModel"
    recipe: Recipe
    plan: Plan
    record: CalibrationRecord
    original: "PreTrainedModel"  # in FP32, as it was given
    tokenizer: "PreTrainedTokenizerBase | None" = None

    def to_frame(self) -> "pandas.DataFrame":
        """One row a quantizer: where it is, and its amax."""
        return self.record.to_frame()

    def facts(self) -> dict[str, Any]:
        """Return what is shown of it."""
        plan, given = self.plan, self.record.data.get("samples")
        spread = describe_spread(self.record.rows())
        return {
            "model": type(self.model).__name__,
            "recipe": self.recipe.name,
            "INT8 linears": share(len(plan.int8), len(plan.int8) + len(plan.high)),
            "INT8 attention": count_of(len(plan.attention), "layer"),
            "calibration": f"{self.record.method}, {count_of(int(given or 0), 'sample')}",
        } | ({"amax spread": spread} if spread else {})

    def export(self, path: str | Path) -> "Exported":
        """Write it as ONNX, as `export` does."""
        return export(self, path)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write a folder that transformers loads as FP32, and `qdqbench.load` with its scales, bit for bit.

        Weights that were trained since are saved as they are now.

        Raises:
            UserError: the folder holds other files.
            CheckFailed: the folder would not give the model again, as after a change of its layers.
        """
        folder = path_of(folder, "folder")
        there = {path.name for path in (folder.iterdir() if folder.is_dir() else [folder] * folder.exists())}
        if there and not {SCALES, RECIPE, "config.json"} <= there:
            raise UserError(f"{folder} holds something else; give a new folder, or one that was saved before")
        plain, record = self._unquantized()
        files.require_writable(folder)
        with quiet("transformers"):
            plain.save_pretrained(folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
        write_record(folder / SCALES, record)
        files.write_text(folder / RECIPE, dump_recipe(self.recipe))
        return folder

    def _unquantized(self) -> "tuple[PreTrainedModel, CalibrationRecord]":
        """Return the model without quantizers, and the record that puts them there again."""
        import torch

        plain: Any = prepare_model(cast("Any", copy.deepcopy(self.original)).cpu())
        channel_splitting.keep_equal(self.model, self.record.splits)()  # after the last step of a training

        def gives_own(record: CalibrationRecord) -> bool:
            own = {name: value.cpu() for name, value in self.model.state_dict().items()}
            rebuilt = _restore(plain, self.recipe, record).model.state_dict()
            return own.keys() == rebuilt.keys() and all(torch.equal(own[name], rebuilt[name]) for name in own)

        if gives_own(self.record):
            return plain, self.record
        record = trained_record(self.model, self.record)
        weights = ptq.take_out(self.model, record)
        shapes = {name: weights[name].shape if name in weights else None for name in plain.state_dict()}
        fits = shapes == {name: value.shape for name, value in plain.state_dict().items()}
        if fits:
            plain.load_state_dict({name: weights[name] for name in shapes})
        if not fits or not gives_own(record):
            raise CheckFailed("layers of the model were changed since it was quantized; quantize it again")
        return plain, record

    def evaluate(
        self,
        task: str,
        data: Any = "hub",
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        progress: Any = None,
        **options: Any,
    ) -> Results:
        """Measure its accuracy on a task, and that of its weights in FP32: `stages` of the results.

        Args:
            task: as of `run`.
            data: as of `run`; rows in memory too.
            tokenizer: of a model that came without one.
            progress: as of `run`.
            options: others of `run`, such as text_column or limit.

        Raises:
            UserError: input that cannot be used.
        """
        from qdqbench.eval.runs.collect import collect
        from qdqbench.eval.runs.run import run_stages

        with (
            tempfile.TemporaryDirectory(prefix="qdqbench-evaluate-") as folder,
            self._session(Path(folder) / "run", task, data, tokenizer, options) as session,
            displayed(progress, "stage"),
        ):
            costs = run_stages(session, "baseline") | run_stages(session, "fake_quant")
            return collect(session, costs, "fake_quant")

    def deploy(
        self,
        folder: str | Path,
        task: str,
        data: Any = "hub",
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        progress: Any = None,
        **options: Any,
    ) -> Results:
        """Take it through a run with the scales that it has: engine, evaluation, report.

        `FOLDER/deploy` loads in other libraries and has scripts that need no qdqbench. FP32, to which INT8 is
        compared, has the weights of this model.

        Args:
            folder: run directory to write.
            task: as of `run`.
            data: as of `run`; rows in memory too.
            tokenizer: of a model that came without one.
            progress: as of `run`.
            options: others of `run`, such as overwrite, backend or limit.

        Raises:
            UserError: input that cannot be used, or a folder that holds something else.
        """
        from qdqbench.eval.runs.run import run_until

        with (
            self._session(path_of(folder, "folder"), task, data, tokenizer, options) as session,
            displayed(progress, "stage"),
        ):
            return run_until(session)

    @contextmanager
    def _session(
        self, out: Path, task: str, data: Any, tokenizer: Any, options: dict[str, Any]
    ) -> Iterator[Session]:
        """Yield a run of this model, which is saved in its folder."""
        tokenizer = _tokenizer_of(tokenizer) or self.tokenizer
        if tokenizer is None:
            raise UserError("the model came without a tokenizer; give tokenizer=")
        if not task or {"model", "revision", "out", "until"} & {*options}:
            raise UserError("give a task, and no model, revision, out or until in the options")
        with tempfile.TemporaryDirectory(prefix="qdqbench-model-") as temporary:
            saved = replace(self, tokenizer=tokenizer).save_pretrained(Path(temporary) / "model")
            asked = parse_options(RunOptions, {"model": saved, "task": task, "data": data, **options})
            with invoked_as("qdqbench.Quantized"):
                config = asked.config(asked.adapt(self.recipe.ptq))
            config = config.model_copy(update={"calibrated": True})
            session = Session(config, out)
            identity = identity_of("run", session)
            with owned_folder(out, identity, overwrite=asked.overwrite, ready=session.require_inputs):
                own = out / "model"
                shutil.rmtree(own, ignore_errors=True)
                shutil.move(saved, own)
                session.config = config.model_copy(update={"model": str(own)})
                yield session


@dataclass(frozen=True, repr=False)
class Exported(Shown):
    """An ONNX file, and what its reader should know."""

    path: Path
    notes: list[str]

    def __fspath__(self) -> str:
        """Return its path, for whatever takes one."""
        return str(self.path)

    def facts(self) -> dict[str, Any]:
        """Return what is shown of it."""
        notes = "; ".join(self.notes) or "none"
        return {"path": self.path, "bytes": self.path.stat().st_size, "notes": notes}


def load_embedder(
    model: str | Path, *, revision: str | None = None, pooling: str | None = None, normalize: bool = False
) -> "PreTrainedModel":
    """Load a sentence-embedding model with pooling in its graph, for `quantize`.

    Args:
        model: folder or hub id, of sentence-transformers or of an encoder.
        revision: of a hub model: branch, tag or commit.
        pooling: of an encoder that does not say it itself: "mean", "cls" or "last".
        normalize: embeddings of length 1; with `pooling`.

    Raises:
        UserError: not found or not supported, or it does not fit what the model says itself.
    """
    options = parse_options(PoolingOptions, {"pooling": pooling, "normalize": normalize})
    return load_model(str(model), revision, PAIRS, options.find_pooling())


def quantize(
    model: "PreTrainedModel | str | Path",
    samples: "Samples | Sequence[str] | pandas.DataFrame",
    recipe: str | Path | Recipe = DEFAULT_RECIPE,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    progress: Callable[[StageProgress], object] | bool | None = None,
) -> Quantized:
    """Calibrate a model in memory (PTQ): quantizers where the recipe says, scales from the samples.

    Args:
        model: FP32 classifier, its folder or hub id, or what `load_embedder` gave; it is not changed, its
            copy is on its device.
        samples: tokens to calibrate with: a list, a tokenized dataset or data frame, a data loader, or one
            batch. An item is one sample (lists of L numbers) or a batch ([B, L] arrays or tensors), with
            input_ids and, where they are known, attention_mask and token_type_ids. All are used, more than
            once, without padding. Or a list of texts.
        tokenizer: of texts (default: that of the model's folder or hub id).
        recipe: shipped name, YAML file, or what `load_recipe` gave; of its calibration section split,
            samples and seed are not used, and of `reconstruction` not samples: all are taken.
        progress: True for a bar (default in notebooks), or a function that is called with the number of
            samples after each batch.

    Raises:
        UserError: an architecture, samples or a recipe that do not fit.
        CheckFailed: weights or an amax that are not finite, positive and plausible; names every layer.
    """
    chosen, texts, tokenizer = recipe, find_texts(samples), _tokenizer_of(tokenizer)
    if isinstance(model, str | Path):
        with suppress(*[] if texts else [UserError]):  # tokens need none
            tokenizer = tokenizer or load_tokenizer(str(model), kind=_kind_of(str(model)))
        model = _load(str(model))
    if not hasattr(model, "config"):
        raise UserError(f"a {type(model).__name__} is no transformers model; give one, its folder or hub id")
    if getattr(model, "base_model", None) is model:
        raise UserError(
            f"a {type(model).__name__} has no head; load it as a classifier, or with load_embedder()"
        )
    if any(name.endswith("_quantizer") for name, _ in model.named_modules()):
        raise UserError("the model has quantizers already; give the original")
    if not isinstance(chosen, Recipe):
        chosen = load_recipe(str(chosen), lambda: family_of(model.config))
    if not chosen.quantizes:
        raise UserError(f"recipe {chosen.name} quantizes nothing; give one with INT8 rules")
    require_fit(chosen, type(model).__name__, model.config)
    twin, plan = _prepare(model, chosen)
    longest = plan.family.positions(twin.config)
    if texts:
        if tokenizer is None:
            raise UserError("the calibration samples are texts; give their tokenizer too: tokenizer=...")
        cut = min(longest, chosen.export.max_length)
        encoded = tokenizer(texts, truncation=True, max_length=cut)
        samples = [{"input_ids": ids} for ids in encoded["input_ids"]]
    embeddings: Any = model.get_input_embeddings()
    sizes = {"input_ids": int(embeddings.num_embeddings)}
    if "token_type_ids" in plan.family.inputs:
        sizes["token_type_ids"] = model.config.type_vocab_size
    settings = chosen.calibration_for(choose_target(chosen).backend).model_copy(update={"split": "memory"})
    batches = Batches(list_samples(samples), settings.batch_size, longest, sizes)
    with displayed(progress):
        reporter().begin("calibrating")
        record = ptq.calibrate(twin, plan, batches, settings)
        if chosen.reconstruction:
            from qdqbench.quantize.training.reconstruct import draw_rows, reconstruct

            pad_id = int(model.config.pad_token_id or 0)
            rows = draw_rows(batches.rows(), chosen.reconstruction, pad_id)
            teacher = prepare_model(copy.deepcopy(model))
            record.notes += reconstruct(twin, teacher, plan, record, rows, chosen.reconstruction).notes
    record.data |= {"source": "samples in memory", "split": settings.split}
    _tie_copies(twin, record)
    return Quantized(twin, chosen, plan, record, model, tokenizer)


def load(folder: str | Path) -> Quantized:
    """Load what `Quantized.save_pretrained` wrote.

    Args:
        folder: that was saved.

    Raises:
        UserError: no such folder, or files that do not fit each other.
    """
    folder = path_of(folder, "folder")
    if not (folder / SCALES).is_file() or not (folder / RECIPE).is_file():
        raise UserError(
            f"{folder} holds no quantized model (no {SCALES} and {RECIPE}); save_pretrained writes one"
        )
    recipe, record = load_recipe(str(folder / RECIPE)), read_record(folder / SCALES)
    tokenizer = load_tokenizer(str(folder)) if (folder / "tokenizer_config.json").is_file() else None
    try:
        return replace(_restore(_load(str(folder)), recipe, record), tokenizer=tokenizer)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"{folder} is damaged: {SCALES} does not fit the model ({why}); save it again"
        ) from error


def _load(name: str) -> "PreTrainedModel":
    """Load a model with the head that it has."""
    return load_model(name, kind=_kind_of(name))


def _kind_of(name: str) -> "TaskKind":
    own = next(iter(load_config(name).architectures or ()), "")
    return PAIRS if has_pooling(name) else kind_of(own) or CLASSIFICATION


def _prepare(model: "PreTrainedModel", recipe: Recipe) -> "tuple[PreTrainedModel, Plan]":
    """Return a copy of a model as the recipe computes it, and what becomes INT8 of it."""
    twin = prepare_model(copy.deepcopy(model))
    if recipe.computes_tanh_on(recipe.engine.backend):  # not of this machine: it may be loaded on another
        use_tanh_gelu(twin, type(model).__name__)
    return twin, resolve(recipe, module_table(twin), twin.base_model_prefix)


def _restore(model: "PreTrainedModel", recipe: Recipe, record: CalibrationRecord) -> Quantized:
    twin, plan = _prepare(model, recipe)
    ptq.restore(twin, plan, record)
    _tie_copies(twin, record)
    return Quantized(twin, recipe, plan, record, model)


def _tie_copies(model: "PreTrainedModel", record: CalibrationRecord) -> None:
    """Let copies of outlier channels follow their originals in any training, such as that of a Trainer."""
    if record.splits:
        hook = partial(_tie, splits=record.splits)
        cast("Any", model).register_forward_pre_hook(hook)


def _tie(model: "PreTrainedModel", *_: Any, splits: dict[str, ChannelSplit]) -> None:
    if model.training:
        channel_splitting.keep_equal(model, splits)()


def export(quantized: Quantized, path: str | Path) -> Exported:
    """Write a fake-quant model as ONNX with INT8 weights, as its recipe says.

    Strongly typed for GPUs, or FP32 with Q/DQ where `engine.backend` names a CPU runtime.

    Args:
        quantized: what `quantize` gave.
        path: ONNX file to write.

    Raises:
        UserError: the exporter fails.
        CheckFailed: a weight was not quantized, a constant does not fit FP16, or the graph is not valid.
    """
    path = path_of(path, "path")
    if not isinstance(quantized, Quantized):
        raise UserError(f"a {type(quantized).__name__} is not quantized; give what quantize() gave")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the file to write, such as {path / 'model.onnx'}")
    recipe, notes = quantized.recipe, list[str]()
    channel_splitting.keep_equal(quantized.model, quantized.record.splits)()  # after the last training step
    asked = recipe.engine.backend
    settings = ExportSettings.of(recipe, gpu_backend() if asked == "auto" else asked)
    traced = trace(quantized.model, recipe.export.opset, name_outputs(quantized.model))
    write_graph(traced, quantized.plan, settings, path, notes)
    return Exported(path, notes)


@take_options
def check(target: str | Path, options: CheckOptions = CheckOptions()) -> CheckReport:  # noqa: B008  (frozen)
    """Find what will run in INT8 of any ONNX file, and what an engine would refuse or get wrong.

    Args:
        target: file of any origin, or a run directory, whose graph is checked against its recipe.

    Raises:
        UserError: an unreadable file, a run without a graph, a recipe that does not fit, an unknown code.
    """
    path, own = find_checked_graph(path_of(target, "target"))
    recipe = options.recipe or own
    expected = recipe_modules(path, recipe) if recipe else None
    return check_file(path, expected_quantized=expected, allow=options.allow or ())


def _tokenizer_of(given: Any) -> Any:
    tokenizer = load_tokenizer(str(given)) if isinstance(given, str | Path) else given
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise UserError(f"a {type(given).__name__} is no tokenizer; give one, its folder or hub id")
    return tokenizer
