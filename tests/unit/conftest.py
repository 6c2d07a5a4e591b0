"""A clock whose seconds pass when told, for what counts time."""

from dataclasses import dataclass

import pytest

from qdqbench import _progress as progress

EVERY_S = progress.EVERY_S  # integration tests silence it for all that follow


@dataclass
class Clock:
    """Seconds that pass when told."""

    now: float = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of signs of life, which begin anew."""
    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", made)
    monkeypatch.setattr(progress, "EVERY_S", EVERY_S)
    progress.reset_clock()
    return made
