"""Parameters of tests that run with `dev.py test --all` only."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_long(values: Iterable[Any], long: Collection[Any]) -> list[Any]:
    """Return the values of one parameter; those that are in `long` are marked so."""
    return [pytest.param(value, marks=pytest.mark.long) if value in long else value for value in values]
