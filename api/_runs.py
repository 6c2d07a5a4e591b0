"""A run directory: the whole path, or the stages up to one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qdqbench.eval.runs.run import StageProgress, follow, require_inputs, run_until
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.pipeline.artifacts import backend_of
from qdqbench.quantize.pipeline.config import adapt_recipe, find_recipe, make_run_config
from qdqbench.quantize.pipeline.ownership import identity_of, open_session, owned_folder, run_folder
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.schema import load_recipe as load_named
from qdqbench.quantize.utils.errors import MissingDevice
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import DEFAULT_RECIPE
from qdqbench.quantize.utils.results import Results
from qdqbench.quantize.utils.system.gpu import find_gpu

StageCallback = Callable[[StageProgress], None]


def silent(now: Any) -> None:
    """No progress is shown."""


def load_recipe(recipe: str | Path | Recipe, model: str | Path | None = None) -> Recipe:
    """A recipe by its shipped name or from a YAML file; one that is loaded already is returned.

    Args:
        recipe: "bert-int8-linears", or with a model "int8-linears" for that of its family.
        model: folder or hub id.

    Raises:
        UserError: no such recipe or file, or it does not validate.
    """
    if isinstance(recipe, Recipe):
        return recipe
    return load_named(str(recipe)) if model is None else find_recipe(str(recipe), str(model))


def run(  # noqa: PLR0913
    recipe: str | Path | Recipe = DEFAULT_RECIPE,
    model: str | Path | None = None,
    task: str | None = None,
    data: str | Path = "hub",
    *,
    out: str | Path | None = None,
    replace: bool = False,
    until: str | None = None,
    revision: str | None = None,
    text_column: Sequence[str] | None = None,
    label_column: str | None = None,
    num_labels: int | None = None,
    metric: Sequence[str] | None = None,
    max_length: int | None = None,
    shapes: str | None = None,
    pooling: str | None = None,
    normalize: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    limit: int | None = None,
    progress: StageCallback = silent,
) -> Results:
    """The main job: recipe and model in, engine and report out. A gate that fails is in the results.

    Args:
        recipe: shipped name, YAML file, or what `load_recipe` gave.
        model: folder or hub id; None with `task` None: the embedded default.
        task: GLUE task, embed, tokens, qa, squad, squad_v2, or a free name with `text_column`.
        data: "hub", "hub:OWNER/NAME[:CONFIG]", either with "@REVISION", or a folder; of task embed also a
            file with one text a line.
        out: run directory; None: runs/MODEL-RECIPE-TASK. Unchanged stages of an earlier run in it are reused.
        replace: what an earlier run left there moves to OUT.old, whatever it belongs to; else another recipe,
            model or task is refused.
        until: a stage to stop after, "evaluate" after all evaluations; None: everything and the report.
        revision: of a hub model: branch, tag or commit.
        text_column: text column of your own data, or the two of a pair.
        label_column: label column of your own data.
        num_labels: classes of your own data; 1 is regression.
        metric: metrics of your own data, the first decides.
        max_length: tokens of a sample; None: as the recipe says. Its profiles follow.
        shapes: "auto": profiles of the lengths that the evaluation data has; None: the recipe's.
        pooling: of a plain encoder as embedding model: "mean", "cls" or "last".
        normalize: embeddings of length 1; with `pooling`.
        batch_size: of the evaluation.
        seed: of bootstrap, parity draw and embedded default.
        limit: evaluate on this many samples; the results warn.
        progress: called as stages start and go on.

    Raises:
        UserError: input that cannot be used.
        CheckFailed: a stage gives what no report can hold, such as NaN.
    """
    model = None if model is None else str(model)
    chosen = recipe if isinstance(recipe, Recipe) else find_recipe(str(recipe), model, revision)
    config = make_run_config(
        adapt_recipe(chosen, max_length=max_length, shapes=shapes),
        model=model,
        revision=revision,
        task=task,
        data=str(data),
        text_column=text_column,
        label_column=label_column,
        num_labels=num_labels,
        metric=metric,
        pooling=pooling,
        normalize=normalize,
        batch_size=batch_size,
        seed=seed,
        limit=limit,
        command="qdqbench.run",
    )
    return start(config, run_folder("run", config, out), until, progress, replace=replace)


def start(  # noqa: PLR0913
    config: RunConfig,
    folder: Path,
    until: str | None = None,
    progress: StageCallback = silent,
    *,
    replace: bool = False,
    say: Callable[[str], None] = silent,
) -> Results:
    """Open a run directory for what was asked, and take it up to a stage as `resume` does.

    Args:
        replace, say: as of `owned_folder`.

    Raises:
        UserError: the folder holds something else.
        MissingDevice: the recipe names a CPU runtime that is not installed; nothing was begun.
    """
    if config.recipe.engine.backend in CPU_BACKENDS:
        choose_backend(config.recipe.engine.backend)
    session = Session(config, folder)
    with owned_folder(
        folder,
        identity_of("run", session),
        replace=replace,
        ready=lambda: require_inputs(session, until),
        say=say,
    ):
        return _run(session, until, progress)


def resume(folder: str | Path, until: str | None = None, progress: StageCallback = silent) -> Results:
    """Take a run directory up to a stage; what has not changed is reused.

    Args:
        folder: of a run that was started.
        until: a stage, "evaluate" for all evaluations; None or "report": everything and the report.
        progress: called as stages start and go on.

    Returns:
        The results; those of the stages up to there where the report was not asked for.

    Raises:
        UserError: no run directory, or no such stage.
        MissingDevice: it ended with the engine, and nothing here can build it.
    """
    with open_session(folder) as session:
        return _run(session, until, progress)


def evaluate(folder: str | Path, progress: StageCallback = silent) -> Results:
    """Measure the accuracy of every stage of a run directory: `stages` of the results.

    Raises:
        UserError: no run directory.
    """
    return resume(folder, "evaluate", progress)


def build(folder: str | Path, progress: StageCallback = silent) -> Results:
    """Build the engine of a run directory, prove its INT8 layers, and verify its outputs where it runs.

    An engine that is not proven, or is wrong, is in the results: `engine`, `verification` and `gate`.

    Raises:
        UserError: no run directory.
        MissingDevice: nothing here can build it.
    """
    with open_session(folder) as session:
        here = find_gpu() or backend_of(session.recipe) in CPU_BACKENDS
        return _run(session, "verify" if here else "build", progress)


def _run(session: Session, until: str | None, progress: StageCallback) -> Results:
    results = run_until(session, until, follow(session, progress, until))
    if until in ("build", "verify") and results.engine is None:
        raise MissingDevice(results.skipped["build"])
    return results
