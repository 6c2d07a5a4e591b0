"""The verdict of the load test: all that does not hold is named."""

from tools.load_serve import verdict


def part(**more):
    """Figures of one load."""
    counts = {"statuses": {"200": 9}, "asked_again": 0, "lost": 0, "wrong": 0, "503_without_retry_after": 0}
    return counts | {"p50_ms": 160.0, "p99_ms": 210.0} | more


def test_what_does_not_hold_is_found():
    found = {name: part() for name in ("poisson_70", "poisson_70_of_32", "killed")}
    found["overload_300"] = part(statuses={"200": 9, "503": 9})
    found |= {"bad_input": {"asked": [400], "got": [400]}, "stopped": {"status": 0, "wrong": 0}}
    assert verdict(found) == []
    found["killed"] |= {"lost": 2}
    found["killed"]["statuses"] |= {"500": 1}
    found["killed"]["asked_again"] = 1  # a front was killed
    found["stopped"]["status"] = 1
    assert len(verdict(found)) == 3
