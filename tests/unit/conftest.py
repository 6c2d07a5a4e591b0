"""A clock whose seconds pass when told, for what counts time."""

from dataclasses import dataclass

import pytest

from qdqbench.quantize.activity import pulse

EVERY_S = pulse.EVERY_S  # integration tests silence it for all that follow


@dataclass
class Clock:
    """Seconds that pass when told."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of signs of life, which begin anew."""
    made = Clock()
    monkeypatch.setattr(pulse.time, "monotonic", made)
    monkeypatch.setattr(pulse, "EVERY_S", EVERY_S)
    pulse.anew()
    return made
