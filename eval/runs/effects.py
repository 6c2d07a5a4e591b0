"""What quantization changed in a run: answers, classes, layers, and the model besides Q/DQ."""

from qdqbench.eval.accuracy.compare import compare
from qdqbench.eval.accuracy.logits import read_logits, score
from qdqbench.eval.effects.answers import changed_answers
from qdqbench.eval.effects.beside import Beside
from qdqbench.eval.effects.changes import Done, model_changes
from qdqbench.eval.effects.classes import classes_of
from qdqbench.eval.runreport.verdict import last_measured
from qdqbench.eval.stages.stages import FP16_STAGE
from qdqbench.quantize.core import files
from qdqbench.quantize.core.comparison import LayerErrors
from qdqbench.quantize.core.results import Results
from qdqbench.quantize.rundir.artifacts import LAYER_ERRORS
from qdqbench.quantize.rundir.session import Session


def add_effects(session: Session, results: Results) -> None:
    """Fill them in, of results whose stages are.

    Raises:
        UserError: the list of changed answers cannot be written.
    """
    last = last_measured(results)
    if last is not None and last[0] != "fp32":
        both = Beside.of(session, last[0])
        dataset = session.eval_splits[both.split][0].dataset
        results.changed = changed_answers(both, dataset, session.folder)
        results.classes = classes_of(both)
        if FP16_STAGE in results.timings:
            _add_fp16(session, results, both)
    if session.recipe.quantizes:
        read_errors = files.read_json(session.folder / LAYER_ERRORS)
        results.layer_errors = LayerErrors.model_validate(read_errors)
        results.model_changes = model_changes(Done.of(session, results.training))


def _add_fp16(session: Session, results: Results, both: Beside) -> None:
    """The FP16 twin against FP32, and the stage nearest to deployment against it."""
    task, seed, folder = session.config.task, session.config.seed, session.folder / "logits"
    path, reference = folder / f"{FP16_STAGE}.npz", folder / "fp32.npz"
    detail = "ONNX Runtime, CPU, FP16 graph as exported (no optimizations)"
    results.fp16 = score(task, path, reference, session.gold, seed, detail)
    half = read_logits(path)[both.split]
    results.vs_fp16 = compare(task, half, both.made, both.gold, seed=seed)
