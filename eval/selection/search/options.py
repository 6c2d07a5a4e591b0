"""Options of a search."""

from pathlib import Path
from typing import Literal

from qdqbench.quantize.utils.options import Duration, Options
from qdqbench.quantize.utils.schema import field

Objective = Literal["sqnr", "drop"]


class SearchOptions(Options):
    trials: int = field("Recipes to try, over all workers.", default=40, ge=1)
    budget: Duration | None = field("Time after which no trial starts, such as 30m.", default=None)
    sensitivity: Path | None = field("File of `qdqbench sensitivity` (default: measured here).", default=None)
    storage: str | None = field("SQLAlchemy URL that several workers share.", default=None)
    study_name: str | None = field("Name of the study (default: RECIPE-TASK).", default=None)
    samples: int = field("Train rows to score trials on; none is used to calibrate.", default=1024, ge=1)
    batch: int = field("Batch size at which latency is measured.", default=32, ge=1)
    length: int = field("Sequence length at which latency is measured, in tokens.", default=128, ge=1)
    objective: Objective = field("First objective: SQNR of the logits, or drop.", default="sqnr")
    speed: Literal["auto", "latency", "int8-share"] = field(
        "Second objective; auto: latency where the engine runs here, else INT8 share of multiply-adds.",
        default="auto",
    )
