"""Fit the cost model to measured rows, and read them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from qdqbench.eval.placement.cost_model import (
    TERMS,
    CostModel,
    CostRow,
    FitError,
    equations,
    load_cost_model,
    solve,
)
from qdqbench.quantize.core.errors import UserError

LEAST_ROWS = 12


def fit_costs(rows: Sequence[CostRow]) -> CostModel:
    """Fit the coefficients to measured rows of one GPU, backend and version.

    Raises:
        UserError: too few rows, or rows of several machines.
    """
    if len(rows) < LEAST_ROWS:
        raise UserError(
            f"{len(rows)} measured rows are too few for {len(TERMS)} terms; measure at least {LEAST_ROWS} "
            "with `qdqbench cost measure`"
        )
    if len({row.engine for row in rows}) < 2:
        raise UserError(
            "the rows are of one engine, so the error on engines left out is unknown; measure other "
            "placements with `qdqbench cost measure`"
        )
    machines = sorted({row.machine for row in rows})
    if len(machines) > 1:
        listed = "; ".join(" ".join(machine) for machine in machines)
        raise UserError(
            f"the rows are of several machines ({listed}); fit one GPU, backend and version at a time"
        )
    coefficients = solve(rows)
    gpu, backend, version = machines[0]
    return CostModel(
        gpu=gpu,
        backend=backend,
        version=version,
        n=len(rows),
        engines=len({row.engine for row in rows}),
        coefficients=dict(zip(TERMS, map(float, coefficients), strict=True)),
        leave_one_out=_leave_one_out(rows),
        rows=list(rows),
    )


def _leave_one_out(rows: Sequence[CostRow]) -> FitError:
    """All rows of an engine are left out together: its other shapes would give it away."""
    errors, speedups = [], []
    for engine in sorted({row.engine for row in rows}):
        others = [row for row in rows if row.engine != engine] or list(rows)
        for row in (row for row in rows if row.engine == engine):
            counts, times = equations([row])
            made = counts @ solve(others, row.batch, row.length)
            errors.append(abs(made[0] - times[0]) / times[0])
            measured = times[1] / times[0]
            speedups.append(abs(made[1] / made[0] - measured) / measured if made[0] > 0 else 1.0)

    def at(values: list[float], percent: float) -> float:
        return float(np.percentile(values, percent))

    return FitError(
        ms_median=at(errors, 50),
        ms_p90=at(errors, 90),
        speedup_median=at(speedups, 50),
        speedup_p90=at(speedups, 90),
    )


def read_rows(path: Path) -> list[CostRow]:
    """Rows of a file of `qdqbench cost measure` (one JSON object a line) or of a fitted cost model.

    Raises:
        UserError: unreadable; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); give files of `qdqbench cost measure`") from error
    try:
        whole: Any = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, dict) and "rows" in whole:
        return load_cost_model(path).rows
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            found.append(CostRow.model_validate_json(line))
        except ValidationError as error:
            if number == len(lines) and not text.endswith("\n"):
                break  # the writer was killed in the middle of it
            raise UserError(f"{path}, line {number}, is no measured engine; remove it") from error
    return found
