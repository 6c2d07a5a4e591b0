"""A model in memory and the files made of it: calibrate, export, check."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench._options import CheckOptions, PoolingOptions
from qdqbench._progress import draw_samples, shown
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant.quantizers import name_outputs
from qdqbench.quantize.calibration.record import CalibrationRecord
from qdqbench.quantize.engine.backend import gpu_backend
from qdqbench.quantize.graph.check.check import CheckReport, check_file
from qdqbench.quantize.graph.export import ExportSettings, trace, write_graph
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.load import load_model, load_tokenizer, prepare_model, use_tanh_gelu
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.pipeline.inspect_target import find_checked_graph, recipe_modules
from qdqbench.quantize.pipeline.session import require_fit
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe, load_recipe
from qdqbench.quantize.tasks.rows import Sample, equal_length_batches
from qdqbench.quantize.tasks.types.embedding import PAIRS
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import DEFAULT_RECIPE, count_of
from qdqbench.quantize.utils.options import parse_options, take_options
from qdqbench.quantize.utils.shown import Shown

if TYPE_CHECKING:
    import pandas
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Samples = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, repr=False)
class Quantized(Shown):
    """A fake-quant model with the record of its calibration."""

    model: "PreTrainedModel"
    recipe: Recipe
    plan: Plan
    record: CalibrationRecord

    def to_frame(self) -> "pandas.DataFrame":
        """One row a quantizer: where it is, and its amax."""
        return self.record.to_frame()

    def facts(self) -> dict[str, Any]:
        """Return what is shown of it."""
        plan, given = self.plan, self.record.data.get("samples")
        return {
            "model": type(self.model).__name__,
            "recipe": self.recipe.name,
            "INT8 linears": f"{len(plan.int8)} of {len(plan.int8) + len(plan.high)}",
            "INT8 attention": count_of(len(plan.attention), "layer"),
            "calibration": f"{self.record.method}, {count_of(int(given or 0), 'sample')}",
        }

    def export(self, path: str | Path) -> "Exported":
        """Write it as ONNX, as `export` does."""
        return export(self, path)


@dataclass(frozen=True, repr=False)
class Exported(Shown):
    """An ONNX file, and what its reader should know."""

    path: Path
    notes: list[str]

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
    progress: Callable[[int], None] | bool | None = None,
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
            samples and seed are not used.
        progress: True for a bar (default in notebooks), or a function that is called with the number of
            samples of each batch.

    Raises:
        UserError: an architecture, samples or a recipe that do not fit.
        CheckFailed: weights or an amax that are not finite, positive and plausible; names every layer.
    """
    chosen = recipe
    if isinstance(model, str | Path):
        tokenizer = tokenizer or (load_tokenizer(str(model)) if _are_texts(samples) else None)
        model = load_model(str(model))
    if not hasattr(model, "config"):
        raise UserError(f"a {type(model).__name__} is no transformers model; give one, its folder or hub id")
    if not isinstance(chosen, Recipe):
        chosen = load_recipe(str(chosen), lambda: family_of(model.config))
    if not chosen.quantizes:
        raise UserError(f"recipe {chosen.name} quantizes nothing; give one with INT8 rules")
    require_fit(chosen, type(model).__name__, model.config)
    twin = prepare_model(copy.deepcopy(model))
    if chosen.export.gelu == "tanh":
        use_tanh_gelu(twin, type(model).__name__)
    plan = resolve(chosen, module_table(twin), twin.base_model_prefix)
    longest = plan.family.positions(twin.config)
    if _are_texts(samples):
        if tokenizer is None:
            raise UserError("the calibration samples are texts; give their tokenizer too: tokenizer=...")
        cut = min(longest, chosen.export.max_length)
        encoded = tokenizer([*samples], truncation=True, max_length=cut)
        samples = [{"input_ids": ids} for ids in encoded["input_ids"]]
    batches = _Batches(_list_samples(samples), chosen.calibration.batch_size, longest)
    with shown(progress, draw_samples) as show:
        record = ptq.calibrate(twin, plan, batches, chosen.calibration, show)
    record.data["source"] = "samples in memory"
    return Quantized(twin, chosen, plan, record)


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
    recipe, notes = quantized.recipe, list[str]()
    asked = recipe.engine.backend
    settings = ExportSettings.of(recipe, gpu_backend() if asked == "auto" else asked)
    traced = trace(quantized.model, recipe.export.opset, name_outputs(quantized.model))
    write_graph(traced, quantized.plan, settings, Path(path), notes)
    return Exported(Path(path), notes)


@take_options
def check(target: str | Path, options: CheckOptions = CheckOptions()) -> CheckReport:  # noqa: B008  (frozen)
    """Find what will run in INT8 of any ONNX file, and what an engine would refuse or get wrong.

    Args:
        target: file of any origin, or a run directory, whose graph is checked against its recipe.

    Raises:
        UserError: an unreadable file, a run without a graph, a recipe that does not fit, an unknown code.
    """
    path, own = find_checked_graph(Path(target))
    recipe = options.recipe or own
    expected = recipe_modules(path, recipe) if recipe else None
    return check_file(path, expected_quantized=expected, allow=options.allow or ())


def _are_texts(samples: Any) -> bool:
    return isinstance(samples, Sequence) and len(samples) > 0 and isinstance(samples[0], str)


def _list_samples(samples: Any) -> Samples:
    """Return samples as items: of one batch that one, of a data frame its rows."""
    if isinstance(samples, Mapping):
        if "input_ids" not in samples:
            raise UserError(
                f"a {type(samples).__name__} of {', '.join(map(str, samples)) or 'nothing'} holds no "
                "input_ids; give one of its splits, or a batch with them"
            )
        return [samples]
    if hasattr(samples, "to_dict") and hasattr(samples, "columns"):
        return [*samples.to_dict("records")]
    if isinstance(samples, str) or not isinstance(samples, Iterable):
        raise UserError(f"a {type(samples).__name__} is no calibration data; give a list of samples or texts")
    return samples


@dataclass(frozen=True)
class _Batches:
    """Samples as batches of equal length, made again on each pass."""

    samples: Samples
    batch_size: int
    longest: int  # tokens of a sample

    def __post_init__(self) -> None:
        if iter(self.samples) is self.samples:
            raise UserError("calibration goes over its samples more than once; give a list, not an iterator")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = (row for given in self.samples for row in _rows(given, self.longest))
        for _, batch in equal_length_batches(rows, self.batch_size, pad_id=0):  # of one length: no padding
            yield batch


def _rows(given: Mapping[str, Any], longest: int) -> Iterator[Sample]:
    """Yield the samples of an item without padding; `UserError` names what does not fit."""
    if not isinstance(given, Mapping):
        raise UserError(f"a calibration sample is a {type(given).__name__}; give a dict with input_ids")
    if "input_ids" not in given:
        raise UserError(f"a calibration sample has {', '.join(given) or 'nothing'}, but no input_ids")
    ids = _array(given["input_ids"])
    mask = _array(given.get("attention_mask", np.ones_like(ids)))
    types = _array(given.get("token_type_ids", np.zeros_like(ids)))
    if not ids.shape == mask.shape == types.shape:
        shapes = ", ".join(str(list(array.shape)) for array in (ids, mask, types))
        names = "input_ids, attention_mask and token_type_ids"
        raise UserError(f"{names} of a calibration sample have shapes {shapes}; give one shape")
    for row, kept in enumerate(mask.astype(bool)):
        if kept.sum() > longest:
            raise UserError(
                f"a calibration sample has {kept.sum()} tokens, but the model has {longest} positions; cut it"
            )
        if kept.any():
            yield Sample(row, ids[row][kept], types[row][kept], False)


def _array(values: Any) -> Any:
    """Int64 [B, L] of lists, arrays or tensors on any device, [L] too."""
    found = np.asarray(values.cpu() if hasattr(values, "cpu") else values, dtype=np.int64)
    return np.atleast_2d(found)
