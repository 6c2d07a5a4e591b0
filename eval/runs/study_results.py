"""Schema of `study.json`: FP32, PTQ and QAT of one task over seeds (documented in docs/qat.md)."""

from pathlib import Path
from typing import Any, Literal

from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.strict import Strict, read
from qdqbench.quantize.core.training_results import Spread

STUDY_FILE = "study.json"


class StudyRow(Strict):
    """One recipe on the FP32 model of one seed."""

    seed: int
    recipe: str
    status: Literal["done", "failed"]
    reason: str | None = None
    fp32: dict[str, float] = {}
    ptq: dict[str, float] = {}
    qat: dict[str, float] = {}
    ptq_vs_fp32: Comparison | None = None
    qat_vs_fp32: Comparison | None = None
    steps: int = 0
    best_step: int = 0
    training_s: float = 0.0  # in steps
    samples_per_s: float | None = None


class StudySummary(Strict):
    """One recipe over the seeds that are done, of the primary metric."""

    fp32: Spread
    ptq: Spread
    qat: Spread
    ptq_minus_fp32: Spread
    qat_minus_fp32: Spread


class Study(Strict):
    """`study.json`."""

    schema_version: Literal[1] = 1
    created: str
    command: str
    base: dict[str, Any]  # name, sha256
    task: dict[str, Any]
    data: str
    n: int  # validation samples
    finetune: dict[str, Any]  # settings of the FP32 models
    recipes: dict[str, Any]  # by name, resolved
    seeds: list[int]
    rows: list[StudyRow]
    summary: dict[str, StudySummary]  # by recipe
    warnings: list[str]
    environment: dict[str, Any]


def read_study(path: Path) -> Study:
    """Read `study.json`.

    Raises:
        UserError: missing or of another version.
    """
    return read(path, Study, "study", "run `qdqbench study` again")
