"""Cells that reports of trials share, and their files."""

from pathlib import Path

from qdqbench.eval.reporting.document import Cell, Report
from qdqbench.eval.reporting.render import write_report
from qdqbench.eval.selection.trials.results import ChoiceRecord
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.comparison import Comparison
from qdqbench.quantize.utils.speedup import Speedup


def change_cell(value: float, comparison: Comparison) -> Cell:
    text = f"{value + 0.0:+.4f} ± {comparison.drop_stderr:.4f}"
    noise = comparison.within_noise
    return Cell(f"{text} (noise)" if noise else text, short=f"{text} ~" if noise else None, sort=value)


def divergence_cell(comparison: Comparison) -> Cell:
    value = comparison.distance
    text = f"{value:.2e} ± {comparison.divergence_stderr:.0e}"
    return Cell(text, short=f"{value:.2e}", sort=value)


def sqnr_text(comparison: Comparison) -> str:
    return "equal" if comparison.sqnr_db is None else f"{comparison.sqnr_db:.1f} dB"


def noise_text(comparison: Comparison) -> str:
    return "within noise" if comparison.within_noise else "beyond noise"


def speed_text(speedup: Speedup | None) -> str:
    return f"{speedup.value:.2f}x" if speedup else ""


def latency_text(speedup: Speedup | None) -> str:
    return f"{speedup.system_ms:.3g}" if speedup else ""


def write_result(result: ChoiceRecord, report: Report, folder: Path) -> list[Path]:
    record = folder / report.page.record
    files.write_text(record, result.model_dump_json(indent=2) + "\n")
    return [record, *write_report(report, folder, record.stem)]
