"""In words what a recipe changed in the model besides Q/DQ, from what calibration and export wrote down."""

from collections.abc import Iterator
from dataclasses import dataclass

from qdqbench.eval.reporting.formats import count_of
from qdqbench.quantize.calibration.record import CalibrationRecord, read_record
from qdqbench.quantize.pipeline.artifacts import REWRITES, backend_of, graph_path
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan, list_bias_free_linears
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.comparison import ModelChange
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.results import TrainingRun


@dataclass(frozen=True)
class ExportedRun:
    """What is known of a run whose graph is exported."""

    recipe: Recipe
    plan: Plan
    record: CalibrationRecord
    rewrites: dict[str, int]  # of the graph that the run is about
    exact_gelu: bool  # of the FP32 model
    half: bool  # what is not INT8 computes in FP16
    training: TrainingRun | None = None

    @classmethod
    def of(cls, session: Session, training: TrainingRun | None) -> "ExportedRun":
        """Read the files of a run that quantizes."""
        config, graph = session.fp32_model.config, graph_path(session)
        on_cpu = backend_of(session.recipe) in CPU_BACKENDS
        return cls(
            recipe=session.recipe,
            plan=session.plan,
            record=read_record(session.record_path),
            rewrites=files.read_json(session.folder / REWRITES).get(graph.name, {}),
            exact_gelu=getattr(config, session.plan.family.activation) == "gelu",
            half=session.recipe.precision.compute == "fp16" and not on_cpu,
            training=training,
        )


def model_changes(done: ExportedRun) -> list[ModelChange]:
    """Return each change once, with how often it was made; none where nothing but Q/DQ was added."""
    return [
        ModelChange(what=what, count=count, description=sentence.format(count_of(count, noun)))
        for what, count, noun, sentence in (*_weights(done), *_moved(done), *_graph(done))
        if count
    ]


Row = tuple[str, int, str, str]  # what, how often, of which noun, and a sentence that takes both as one


def _weights(done: ExportedRun) -> Iterator[Row]:
    """Yield what is not the model's own any more."""
    record, plan, training = done.record, done.plan, done.training
    steps = training.best_step if training else 0
    yield "training", steps, "step", "The weights are those after {} of quantization-aware training."
    tried = count_of(
        len([name for name in plan.int8 if name not in list_bias_free_linears(plan)]), "INT8 linear"
    )
    said = f"The biases of {{}} of {tried} make up for the mean error of rounding; the others gained nothing."
    yield "bias correction", len(record.biases), "linear", said
    if done.exact_gelu and done.recipe.export.gelu == "tanh":
        said = "GELU has its tanh form in {}, off by 5e-4 at most."
        yield "tanh GELU", done.rewrites.get("tanh GELU", 0), "feed-forward", said
    said = "The amax of {} is the recipe's and not calibration's."
    yield "given ranges", len(record.replaced), "activation", said


def _moved(done: ExportedRun) -> Iterator[Row]:
    """Yield what is computed elsewhere, with the same result before rounding."""
    record, straight = done.record, list_bias_free_linears(done.plan)
    said = "The input channels of {} are multiplied by powers of two, which their weights undo (SmoothQuant)."
    yield "smoothing", len(record.smoothing.inputs), "linear", said
    said = "The rows of {} (q, k, v) are scaled by powers of two, undone in scores or behind the attention."
    yield "scaled rows", len(record.smoothing.rows), "linear", said
    copied = sum(len(split.outliers) for split in record.splits.values())
    extra = max((split.extra for split in record.splits.values()), default=0)
    said = (
        f"{{}} of {count_of(len(record.splits), 'feed-forward')} are split into copies, for which each "
        f"feed-forward is {extra} channels wider."
    )
    yield "split channels", copied, "outlier channel", said
    moved = len([name for name in record.centers if name in straight])
    said = "The biases of {} of q, k and v are gone; k's changes no softmax, v's is behind the attention."
    yield "moved biases", moved, "linear", said
    said = (
        "What q, k and v of {} read is shifted where it is made, which does what the bias of q did; "
        "what else that does is taken out behind the attention."
    )
    yield "shifted inputs", len(record.shifts), "INT8 attention", said
    centred = {row.module for row in record.softmax if row.centered}
    said = (
        "The values of {} are centred, so that a softmax that rounds to zero loses little; their mean is in "
        "the attention's output."
    )
    yield "centred values", len(centred), "INT8 attention", said


def _graph(done: ExportedRun) -> Iterator[Row]:
    """Yield the form of the graph."""
    plan, rewrites = done.plan, done.rewrites
    yield "INT8 attention", len(plan.attention), "attention", "q, k, v and the softmax of {} are in INT8."
    said = "{} read the INT8 tensor that the next linears read."
    yield "INT8 residuals", len(plan.residual), "residual sum", said
    if done.half:
        yield "FP16", len(plan.high), "linear", "What is not INT8 computes in FP16, {} among it."
    said = "q, k and v of {} go to their heads in one step."
    yield "joined heads", rewrites.get("joined heads", 0), "attention", said
    said = "Hidden states are [length, batch, hidden] through {}, which saves copies."
    yield "tokens first", rewrites.get("tokens first", 0), "attention", said
    said = "{} written as x sigmoid(x (a + b x²)), the same function."
    yield "short GELU", rewrites.get("short GELU", 0), "tanh GELU", said
