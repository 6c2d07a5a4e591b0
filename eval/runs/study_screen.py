"""A study in the terminal, and the conditions it was measured under."""

from typing import TYPE_CHECKING, Any

from qdqbench.eval.reporting.formats import in_points, label, model_label, versions_text
from qdqbench.eval.runs.study import Study
from qdqbench.quantize.utils.results import Spread

if TYPE_CHECKING:
    from rich.console import Group


def study_summary(study: Study) -> "Group":
    """Render one study for the terminal: a row per recipe."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    name = label(study.task["metrics"][0])
    done = next(iter(study.summary.values()))
    head = (
        f"QAT over seeds: {model_label(str(study.base['name']))}, {label(str(study.task['name']))}. FP32 has "
        f"{name} {_percent(done.fp32)} (mean ± standard deviation over {done.fp32.n} seeds, n = {study.n})."
    )
    table = Table("recipe", name, "PTQ - FP32", "QAT - FP32", box=None, pad_edge=False)
    for recipe, row in study.summary.items():
        cells = _percent(row.qat), _percent(row.ptq_minus_fp32, "+"), _percent(row.qat_minus_fp32, "+")
        table.add_row(*map(Text, (recipe, *cells)))
    lines = conditions(study.environment, study.finetune, study.recipes), *study.warnings
    return Group(Text(head), table, *map(Text, lines))


def conditions(environment: dict[str, Any], finetune: dict[str, Any], recipes: dict[str, Any]) -> str:
    """Return hardware, versions and the settings of both trainings of a study, in one line."""
    hardware = environment["gpu"] if environment["gpu"] != "none" else environment["cpu"]
    trained = dict.fromkeys(_settings(recipe["qat"]) for recipe in recipes.values())
    return (
        f"{hardware}, {versions_text(environment)}; FP32: {_settings(finetune)}; QAT: {' or '.join(trained)}"
    )


def _settings(training: dict[str, Any]) -> str:
    """Length and size of the steps of a training."""
    most = f", at most {training['max_steps']} steps" if training["max_steps"] else ""
    return (
        f"{training['epochs']:g} epochs{most}, batch {training['batch_size']}, learning rate "
        f"{training['learning_rate']:g}, precision {training['precision']}"
    )


def _percent(spread: Spread, sign: str = "") -> str:
    return in_points(spread.mean, spread.sd, sign)
