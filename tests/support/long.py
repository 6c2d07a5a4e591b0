"""Parameters of tests that run with `dev.py test --all` only."""

import pytest


def mark_long(values, long):
    """Return the values of one parameter; those that are in `long` are marked so."""
    return [pytest.param(value, marks=pytest.mark.long) if value in long else value for value in values]
