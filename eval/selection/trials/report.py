"""Cells that reports of trials share, and their files."""

from pathlib import Path

from qdqbench.eval.reporting.document import Cell, Report
from qdqbench.eval.reporting.render import write_report
from qdqbench.eval.selection.trials.results import ChoiceRecord
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.comparison import Comparison


def change_cell(value: float, comparison: Comparison) -> Cell:
    """Return a change of the primary metric with its paired standard error, and whether it is noise."""
    text = f"{value + 0.0:+.4f} ± {comparison.drop_stderr:.4f}"
    noise = comparison.within_noise
    return Cell(f"{text} (noise)" if noise else text, short=f"{text} ~" if noise else None, sort=value)


def divergence_cell(comparison: Comparison) -> Cell:
    """Return a divergence with its standard error, which a terminal leaves out."""
    value = comparison.distance
    text = f"{value:.2e} ± {comparison.divergence_stderr:.0e}"
    return Cell(text, short=f"{value:.2e}", sort=value)


def sqnr_text(comparison: Comparison) -> str:
    return "equal" if comparison.sqnr_db is None else f"{comparison.sqnr_db:.1f} dB"


def noise_text(comparison: Comparison) -> str:
    return "within noise" if comparison.within_noise else "beyond noise"


def write_result(result: ChoiceRecord, report: Report, folder: Path) -> list[Path]:
    """Write the JSON file that a report names, its Markdown and its page."""
    record = folder / report.page.record
    files.write_text(record, result.model_dump_json(indent=2) + "\n")
    return [record, *write_report(report, folder, record.stem)]
