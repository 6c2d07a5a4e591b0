"""Accuracy on the pages is of the present calibration: what it gives for a tiny model is kept with a date.

Where another amax or bias of a recipe is meant, `RECORD_GOLDEN=1` keeps it, with the present time. Then
`tools/tables.py` refuses accuracy from before, until it is measured again or deleted.
"""

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from qdqbench.quantize.recipe.schema import load_recipe

from ...support.tiny_bert import calibrate, new_bert, write_tiny_bert

FILE = Path(__file__).parents[3] / "docs" / "measured" / "calibration.json"
TOLERANCE = {"corrected": 0.5}  # relative: whether one helps differs between machines where it hardly does
RECIPES = ("attention", "ffn", "linears", "linears-per-tensor", "residual", "residual-fused")
BACKENDS = ("cuda", "tensorrt", "openvino", "onnxruntime")


def summarize(folder, name, backend):
    """Return sums over what calibration of a recipe gives, which rounding of FP32 hardly moves."""
    recipe = load_recipe(f"bert-int8-{name}")
    section = recipe.calibration_for(backend)
    record = calibrate(folder, recipe.model_copy(update={"calibration": section})).record
    amax = np.concatenate([np.atleast_1d(state.amax) for state in record.quantizers.values()])
    return {
        "amax": float(np.log2(amax).sum()),
        "smoothing": sum(
            float(np.abs(np.log2(factors)).sum()) for factors in record.smoothing.inputs.values()
        ),
        "moved": _size(record.centers, record.centering.biases),
        "corrected": _size(record.biases, record.centering.rounding),
        "shifts": len(record.shifts),
    }


def _size(*parts):
    return sum(float(np.abs(values).sum()) for part in parts for values in part.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_calibration_gives_what_it_gave_when_accuracy_was_measured(backend, tmp_path):
    folder = write_tiny_bert(tmp_path, new_bert())
    kept = json.loads(FILE.read_text()) if FILE.is_file() else {}
    found = {name: summarize(folder, name, backend) for name in RECIPES}
    old = kept.get(backend, {})
    changed = [name for name in RECIPES if not _is_same(found[name], old.get(name, {}))]
    if changed and os.environ.get("RECORD_GOLDEN"):
        since = {"since": f"{datetime.now(UTC):%Y-%m-%dT%H:%M}"}
        rounded = {name: {part: round(value, 3) for part, value in found[name].items()} for name in changed}
        kept[backend] = old | {name: since | parts for name, parts in rounded.items()}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
        changed = []
    assert not changed, f"{found} is not {old}: accuracy on the pages is of another calibration"


def _is_same(found, old):
    return {"since", *found} == old.keys() and all(
        math.isclose(value, old[part], rel_tol=TOLERANCE.get(part, 1e-3), abs_tol=1e-3)
        for part, value in found.items()
    )
