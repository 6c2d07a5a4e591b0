"""How the share that is in INT8 is put into words, by every command and report."""


def coverage(done: int, asked: int, what: str = "GEMMs") -> str:
    """Return how much runs in INT8 of what should: `35 of 36 GEMMs in INT8`."""
    return f"{done} of {asked} {what} in INT8"


def uncovered(lost: int, asked: int, what: str = "GEMMs") -> str:
    """Return how much of what should run in INT8 does not: `1 of 36 GEMMs do not run in INT8`."""
    return f"{lost} of {asked} {what} do not run in INT8"
