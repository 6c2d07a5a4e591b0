"""How the share that is in INT8 is put into words, by every command and report."""


def share(done: int, asked: int) -> str:
    """Return a share under a heading that says of what: `35 of 36`."""
    return f"{done} of {asked}"


def coverage(done: int, asked: int, what: str = "GEMMs") -> str:
    """Return how much runs in INT8 of what should: `35 of 36 GEMMs in INT8`."""
    return f"{share(done, asked)} {what} in INT8"


def uncovered(lost: int, asked: int, what: str = "GEMMs") -> str:
    """Return how much of what should run in INT8 does not: `1 of 36 GEMMs do not run in INT8`."""
    return f"{share(lost, asked)} {what} do not run in INT8"
