"""Every architecture of transformers is served with its own logits, or refused by its name at once."""

import json
import os
from pathlib import Path

import pytest

from ..support import zoo

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[2] / "docs" / "measured-zoo" / "types.json"
FEW = ["bert", "ernie", "xmod", "gpt2", "t5", "convbert", "fnet", "layoutlm"]


def outcomes(head, types, folder):
    data = zoo.write_data(folder / "data")
    return {each: zoo.take(folder / each, data, each, head) for each in types}


def recorded(head, types):
    """What the page says, as reasons by type; empty where a type is served."""
    by_reason = json.loads(FILE.read_text())[head]
    found = {each: reason for reason, listed in by_reason.items() for each in listed}
    return {each: found[each] for each in types}


def by_reason(found):
    reasons = sorted({each.reason for each in found.values()})
    return {reason: sorted(each for each in found if found[each].reason == reason) for reason in reasons}


def test_a_few_types(tmp_path):
    found = outcomes("classification", FEW, tmp_path)
    assert {each: outcome.reason for each, outcome in found.items()} == recorded("classification", FEW)
    assert max(outcome.gap for outcome in found.values()) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("head", zoo.HEAD_KINDS)
def test_every_type(head, tmp_path):
    """With RECORD_ZOO=1 it writes the file of the page."""
    types = zoo.model_types(head)
    found = outcomes(head, types, tmp_path)
    assert max(outcome.gap for outcome in found.values()) < 1e-3
    if os.environ.get("RECORD_ZOO"):
        kept = json.loads(FILE.read_text()) if FILE.is_file() else {}
        FILE.write_text(json.dumps(kept | {head: by_reason(found)}, indent=1, sort_keys=True) + "\n")
    assert {each: outcome.reason for each, outcome in found.items()} == recorded(head, types)
