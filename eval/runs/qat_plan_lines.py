"""A plan of a QAT on a terminal."""

from collections import Counter
from typing import TYPE_CHECKING

from qdqbench.eval.report.formats import remarks
from qdqbench.eval.runs.qat_plan import QatPlan
from qdqbench.quantize.activity.pulse import duration
from qdqbench.quantize.families.known import family_named

if TYPE_CHECKING:
    from rich.console import Group


def plan_lines(plan: QatPlan) -> "Group":
    """The plan on a terminal, as a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in _lines(plan):
        table.add_row(Text(name, style="bold"), Text(text))  # Text: names are never read as markup
    warned = [Text(line, style="yellow") for line in plan.findings]
    warned += remarks(plan.warnings, plan.notes)
    title = f"QAT plan of {plan.recipe}, made in {duration(plan.plan_s)}; nothing was trained"
    return Group(Text(title, style="bold"), table, *warned)


def _lines(plan: QatPlan) -> list[tuple[str, str]]:
    cost, settings = plan.cost, plan.settings
    kinds = Counter(map(family_named(plan.family).kind, plan.quantized))
    per_step = settings["batch_size"] / cost.step_s
    epochs = cost.steps * settings["batch_size"] / cost.rows
    return [
        ("quantized", f"{len(plan.quantized)} linears ({', '.join(f'{n} {k}' for k, n in kinds.items())})"),
        ("attention", f"{len(plan.attention)} in INT8"),
        ("high precision", ", ".join(plan.high_precision) or "no linear"),
        ("engine", _engine(plan)),
        ("gap to close", _gap(plan)),
        (
            "training",
            f"{cost.steps} steps of {settings['batch_size']} samples "
            f"({epochs:.2g} epochs of "
            f"{cost.rows} rows, {cost.held_out} held out), {cost.evaluations} evaluations",
        ),
        (
            "time",
            f"{duration(cost.total_s)}: steps {duration(cost.steps * cost.step_s)} "
            f"({1000 * cost.step_s:.0f} ± {1000 * cost.step_s_sd:.0f} ms each, median of "
            f"{cost.measured_steps}; {per_step:.0f} samples/s), FP32 answers "
            f"{duration(cost.teacher_s)}, evaluations {duration(cost.evaluation_s)}; by a draw of "
            f"{cost.drawn} rows",
        ),
        (
            "memory",
            f"{cost.memory_bytes / 1e9:.2f} GB at most, of the {cost.memory_of}",
        ),
        (
            "disk",
            f"{cost.disk_bytes / 1e9:.2f} GB of checkpoints, {cost.disk_free_bytes / 1e9:.0f} GB are free",
        ),
        (
            "device",
            f"{cost.device}, {cost.processes} process{'es'[: 2 * (cost.processes > 1)]}, {cost.precision}",
        ),
    ]


def _engine(plan: QatPlan) -> str:
    if (runs := plan.engine) is None:
        return "not built: --with-ptq builds it and reads what it runs in INT8"
    if runs.int8_gemms is None:
        return f"not known, no engine was built: {runs.reason}"
    proof = f"{runs.int8_gemms} of {runs.expected} GEMMs"
    if runs.expected_attention_int8:
        proof += f", {runs.attention_int8} of {runs.expected_attention_int8} attentions"
    proof += f" in INT8 ({runs.backend}, from its layer table)"
    return f"{proof}; NOT in INT8: {', '.join(runs.not_int8)}" if runs.not_int8 else proof


def _gap(plan: QatPlan) -> str:
    if plan.gap is None or plan.fp32 is None:
        return f"not known: --with-ptq runs PTQ first, which takes about {duration(plan.ptq_s or 0)} here"
    delta, error = plan.gap.delta[plan.metric], plan.gap.delta_stderr[plan.metric]
    noise = " (within noise: there may be nothing to win back)" if plan.gap.within_noise else ""
    return f"{plan.metric} {plan.fp32:.4f} in FP32, PTQ {delta:+.4f} ± {error:.4f}{noise}"
