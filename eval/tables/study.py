"""The table of studies: FP32, PTQ and QAT over seeds, in Markdown."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qdqbench.eval.report.formats import in_points, label, model_label, text, versions_text
from qdqbench.eval.runs.study import Study, StudySummary
from qdqbench.eval.tables.accuracy import table
from qdqbench.eval.tables.changed import Changed
from qdqbench.quantize.core.training_results import Spread

if TYPE_CHECKING:
    from rich.console import Group


def study_tables(studies: Sequence[Study], changed: Changed) -> list[str]:
    """One table per base encoder: a row per task and recipe, in points of the primary metric."""
    parts = []
    for base in sorted({study.base["sha256"] for study in studies}):
        same = sorted(
            (study for study in studies if study.base["sha256"] == base), key=lambda s: str(s.task["name"])
        )
        rows = [
            _row(study, name, summary, changed) for study in same for name, summary in study.summary.items()
        ]
        title = (
            f"### QAT over seeds: {text(same[0].base['name'])}\n\nMean ± standard deviation over seeds of "
            "the validation metric in percent, fake-quant in PyTorch. Differences are taken seed by seed. "
            "Every seed is a fine-tuning of its own, then PTQ and QAT of it."
        )
        header = ["task", "metric", "recipe", "seeds", "n", "FP32", "PTQ", "QAT", "PTQ - FP32", "QAT - FP32"]
        places = list(dict.fromkeys(_where(study) for study in same))
        notes = [f"- {number + 1}: {text(line)}" for number, line in enumerate(places)]
        notes += [f"- {text(study.task['name'])}: {text(line)}" for study in same for line in study.warnings]
        numbered = [[*row, str(places.index(_where(study)) + 1)] for study, row in rows] + _means(
            same, changed
        )
        parts += [title, table([*header, "where"], numbered), "\n".join(notes)]
    return parts


def study_summary(study: Study) -> "Group":
    """One study for the terminal: a row per recipe."""
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
    notes = [Text(line) for line in (_where(study), *study.warnings)]
    return Group(Text(head), table, *notes)


def _row(study: Study, recipe: str, summary: StudySummary, changed: Changed) -> tuple[Study, list[str]]:
    task = study.task
    return study, [
        text(task["name"]),
        text(task["metrics"][0]),
        changed.label(study.recipes[recipe]),
        str(summary.qat.n),
        str(study.n),
        _percent(summary.fp32),
        _percent(summary.ptq),
        _percent(summary.qat),
        _percent(summary.ptq_minus_fp32, "+"),
        _percent(summary.qat_minus_fp32, "+"),
    ]


def _means(studies: Sequence[Study], changed: Changed) -> list[list[str]]:
    """A row per recipe: means over the tasks, where there are several."""
    found = []
    groups: dict[str, list[tuple[str, StudySummary]]] = defaultdict(list)
    for study in studies:
        for name, summary in study.summary.items():
            groups[changed.label(study.recipes[name])].append((str(study.task["name"]), summary))
    for recipe, pairs in groups.items():
        each = [summary for _, summary in pairs]
        if len(each) == len({task for task, _ in pairs}) > 1:
            ptq, qat = (
                f"{100 * sum(s.mean for s in differences) / len(each):+.2f}"
                for differences in ([s.ptq_minus_fp32 for s in each], [s.qat_minus_fp32 for s in each])
            )
            found.append([f"mean of {len(each)}", "", recipe, "", "", "", "", "", ptq, qat, ""])
    return found


def _where(study: Study) -> str:
    found = study.environment
    hardware = found["gpu"] if found["gpu"] != "none" else found["cpu"]
    trained = dict.fromkeys(_settings(recipe["qat"]) for recipe in study.recipes.values())
    return (
        f"{hardware}, {versions_text(found)}; FP32: {_settings(study.finetune)}; QAT: {' or '.join(trained)}"
    )


def _settings(training: dict[str, Any]) -> str:
    """Length and size of the steps of a training, in words."""
    most = f", at most {training['max_steps']} steps" if training["max_steps"] else ""
    return (
        f"{training['epochs']:g} epochs{most}, batch {training['batch_size']}, learning rate "
        f"{training['learning_rate']:g}, precision {training['precision']}"
    )


def _percent(found: Spread, sign: str = "") -> str:
    return in_points(found.mean, found.sd, sign)
