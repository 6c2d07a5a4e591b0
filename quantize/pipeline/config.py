"""The configuration of a run from what a user asked for."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from qdqbench.quantize.models.families.known import BERT, family_of
from qdqbench.quantize.models.identity import has_pooling
from qdqbench.quantize.models.load import load_config, read_class_names
from qdqbench.quantize.models.pooling import MODES, Pooling
from qdqbench.quantize.pipeline.session import RunConfig
from qdqbench.quantize.recipe.schema import Recipe, load_recipe, validate_recipe
from qdqbench.quantize.recipe.sections import AUTO
from qdqbench.quantize.tasks.rows import add_label_values
from qdqbench.quantize.tasks.task import EMBEDDED, Task, get_task, score_embeddings, with_classes
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION
from qdqbench.quantize.utils.errors import UserError


def find_recipe(name: str, model: str | None, revision: str | None = None) -> Recipe:
    """Find a recipe by name, which may be family-free, or from a YAML file.

    Args:
        name: as of `recipe.schema.load_recipe`.
        model: folder or hub id; None: the embedded default.
        revision: of a hub model.

    Raises:
        UserError: no such recipe, none for the model's family, or a model that cannot be read.
    """
    return load_recipe(name, lambda: BERT if model is None else family_of(load_config(model, revision)))


def adapted(
    recipe: Recipe,
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
    max_length: int | None = None,
    backend: str | None = None,
    shapes: Literal["auto"] | None = None,
) -> Recipe:
    """Return a recipe with what a call asks for beside it; None: as the recipe has it.

    Args:
        recipe: not changed.
        fields: values of any fields, by path: calibration.samples, rules.0.precision.
        max_length: tokens of a sample, which is cut there; the longest profiles end there.
        backend: of the engine.
        shapes: "auto": profiles follow the data.

    Raises:
        UserError: no such field, or values that do not go together.
    """
    data, changes = recipe.model_dump(mode="json"), []
    for path, value in fields.items():
        _set_field(data, path, value)
        changes.append(f"{path}={value}")
    if shapes is not None:
        data["engine"]["shapes"] = shapes
        changes.append("shapes of the data")
    if backend is not None:
        data["engine"]["backend"] = backend
        changes.append(f"backend {backend}")
    if max_length is not None:
        data["export"]["max_length"] = max_length
        kept = data["engine"]["shapes"]
        longest = max((each.length[2] for each in recipe.engine.profiles), default=max_length)
        for each in [] if kept == AUTO else [kept] if isinstance(kept, dict) else kept:
            each["length"] = [
                max_length if size == longest else min(size, max_length) for size in each["length"]
            ]
        changes.append(f"{max_length} tokens")
    return validate_recipe(data, f"recipe {recipe.name} for {', '.join(changes)}") if changes else recipe


def _set_field(data: Any, path: str, value: Any) -> None:
    """Set a field of a recipe's data; validation names a key that does not exist.

    Raises:
        UserError: the path goes through a value without fields.
    """
    parts: list[Any] = [int(part) if part.isdigit() else part for part in path.split(".")]
    try:
        for part in parts[:-1]:
            if isinstance(data, dict) and data.get(part) is None:
                data[part] = {}
            data = data[part]
        data[parts[-1]] = value
    except (TypeError, IndexError) as error:
        raise UserError(
            f"--set {path}: a recipe has no such path; `qdqbench recipes show RECIPE --resolved` prints all"
        ) from error


def find_task(  # noqa: PLR0913
    *,
    model: str | None,
    task: str | None,
    text_column: Sequence[str] | None = None,
    label_column: str | None = None,
    num_labels: int | None = None,
    metric: Sequence[str] | None = None,
) -> Task:
    """Return the task that was asked for; without model and task that of the embedded default.

    Raises:
        UserError: a model without a task, a task without a model, or as `tasks.task.get_task`.
    """
    if (model is None) != (task is None):
        raise UserError("--model and --task belong together; give both, or neither for the embedded default")
    if task is None:
        return EMBEDDED
    return get_task(
        task,
        text_columns=text_column or (),
        label_column=label_column,
        num_labels=num_labels,
        metrics=metric or (),
    )


def select_pooling(mode: str | None, normalize: bool) -> Pooling | None:
    """Return the pooling of --pooling and --normalize.

    Raises:
        UserError: an unknown mode, or normalization alone.
    """
    if mode is None:
        if normalize:
            raise UserError("--normalize belongs to --pooling; give both")
        return None
    if mode not in MODES:
        raise UserError(f"--pooling {mode} is not known; choose from {', '.join(MODES)}")
    return Pooling(mode=mode, normalize=normalize)


def make_run_config(  # noqa: PLR0913
    recipe: Recipe,
    *,
    model: str | None = None,
    revision: str | None = None,
    task: str | None = None,
    data: str = "hub",
    text_column: Sequence[str] | None = None,
    label_column: str | None = None,
    num_labels: int | None = None,
    metric: Sequence[str] | None = None,
    pooling: str | None = None,
    normalize: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    limit: int | None = None,
    command: str = "qdqbench run",
) -> RunConfig:
    """Return the configuration of a run with these options.

    Raises:
        UserError: as `find_task`, a revision without a model, or an embedding model and a task that cannot
            judge it.
    """
    chosen = find_task(
        model=model,
        task=task,
        text_column=text_column,
        label_column=label_column,
        num_labels=num_labels,
        metric=metric,
    )
    if revision is not None and model is None:
        raise UserError(f"--revision {revision} belongs to --model with a hub id; give that too")
    if model is not None and chosen.kind.names_classes:
        chosen = with_classes(chosen, read_class_names(model, revision, chosen.kind))
    if model is not None and chosen.kind is CLASSIFICATION:
        chosen = add_label_values(chosen, data, read_class_names(model, revision, chosen.kind))
    pooling_settings = select_pooling(pooling, normalize)
    if model is not None and (pooling_settings or has_pooling(model, revision)):
        chosen = score_embeddings(chosen, metric or ())
    return RunConfig(
        recipe=recipe,
        model=model,
        revision=revision,
        pooling=pooling_settings,
        task=chosen,
        data=data,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        command=command,
    )
