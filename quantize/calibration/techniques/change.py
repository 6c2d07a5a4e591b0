"""What a report says of a technique."""

from typing import NamedTuple


class Change(NamedTuple):
    """A change of the model besides Q/DQ, and how often it was made."""

    what: str
    times: int
    noun: str  # of what is counted
    sentence: str  # takes the count with its noun
