"""Every architecture of transformers is served with its own logits, or refused by its name at once."""

import json
import os
from pathlib import Path

import pytest

from ..support import zoo

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[2] / "docs" / "measured-zoo" / "types.json"
RECORDED = json.loads(FILE.read_text())
HEADS = os.environ.get("RECORD_ZOO", "").split() or [*RECORDED]
FEW = ["ernie", "gpt2", "t5", "convbert", "fnet", "layoutlm", "layoutlmv3"]


def outcomes(head, types, folder):
    data = zoo.write_data(folder / "data")
    return {each: zoo.take(folder / each, data, each, head) for each in types}


def recorded(head, types):
    """Reasons by type, as the page has them; empty where a type is served."""
    found = {each: reason for reason, listed in RECORDED[head].items() for each in listed}
    return {each: found[each] for each in types}


def by_reason(found):
    reasons = sorted({each.reason for each in found.values()})
    return {reason: sorted(each for each in found if found[each].reason == reason) for reason in reasons}


def test_a_few_types(tmp_path):
    found = outcomes("classification", FEW, tmp_path)
    assert {each: outcome.reason for each, outcome in found.items()} == recorded("classification", FEW)
    assert max(outcome.gap for outcome in found.values()) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("head", HEADS)
def test_every_type(head, tmp_path):
    """RECORD_ZOO="tokens questions" runs these heads, and adds them to the file of the page."""
    found = outcomes(head, zoo.model_types(head), tmp_path)
    assert max(outcome.gap for outcome in found.values()) < 1e-3
    if os.environ.get("RECORD_ZOO"):
        written = json.loads(FILE.read_text()) | {head: by_reason(found)}
        FILE.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    else:
        assert {each: outcome.reason for each, outcome in found.items()} == recorded(head, [*found])
