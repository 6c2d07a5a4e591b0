"""What tools/faults.py takes for the same, and what it complains about."""

import pytest
from tools.faults import Ended, content, differences


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"wall_s": 1.5, "n": 2}', '{"wall_s": 0.25, "n": 2}', True),
        ('{"wall_s": 1.5, "n": 2}', '{"wall_s": 1.5, "n": 3}', False),
        ('{"notes": []}', '{"notes": [\n  "resumed after step 2"\n]}', True),
        ('{"notes": ["a"]}', '{"notes": ["a", "resumed after step 2"]}', True),
        ('{"notes": ["a"]}', '{"notes": []}', False),
        ("| build | 0.3 s |", "| build ((reused)) | 11 s |", True),
        ("| accuracy | 0.91 |", "| accuracy | 0.92 |", False),
    ],
)
def test_what_may_differ_and_what_not(tmp_path, one, other, same):
    found = []
    for text in (one, other):
        (tmp_path / "file").write_text(text)
        found.append({"file": content(tmp_path / "file")})
    assert (differences(*found) == []) == same


def test_what_is_lost_and_what_is_left():
    assert differences({"a": b""}, {"b": b""}) == ["lost: a", "left: b"]


@pytest.mark.parametrize(
    ("status", "lines", "wrong"),
    [
        (130, ["qdqbench: interrupted; the same command resumes"], 0),
        (1, ["qdqbench: interrupted; the same command resumes"], 1),
        (130, ["Traceback", "qdqbench: interrupted; the same command resumes"], 1),
        (1, ["qdqbench: unexpected failure, x"], 3),
    ],
)
def test_how_an_interrupted_command_has_to_end(status, lines, wrong):
    assert len(Ended(status, lines, 1.0).complaints(130, "interrupted; .*")) == wrong
