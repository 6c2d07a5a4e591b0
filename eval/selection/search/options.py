"""Options of a search."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from qdqbench.quantize.utils.options import Duration, Options

Objective = Literal["divergence", "drop"]  # first objective: smaller is better


class SearchOptions(Options):
    trials: int = Field(default=40, ge=1, description="Recipes to try, over all workers.")
    budget: Duration | None = Field(
        default=None, description="Time after which no trial starts, such as 30m."
    )
    sensitivity: Path | None = Field(
        default=None,
        description="File of `qdqbench sensitivity`, whose worst layers leave INT8 first; none: measured.",
    )
    storage: str | None = Field(
        default=None, description="SQLAlchemy URL that all workers share; none: OUT/study.db."
    )
    study_name: str | None = Field(default=None, description="Name of the study (default: RECIPE-TASK).")
    samples: int = Field(
        default=1024,
        ge=1,
        description="Train rows that trials are scored on, apart from those that calibrate.",
    )
    batch: int = Field(default=32, ge=1, description="Batch size of the latency.")
    length: int = Field(default=128, ge=1, description="Tokens per sequence of the latency.")
    objective: Objective = Field(
        default="divergence",
        description="First objective: divergence from FP32's logits, or drop of the metric.",
    )
    speed: Literal["auto", "latency", "int8-share"] = Field(
        default="auto",
        description="Second objective: measured latency, or INT8 share of multiply-adds; auto: latency where "
        "the engine runs here.",
    )
