"""What trtexec wrote: good files, its own oddities, and files that are broken."""

from pathlib import Path

import numpy as np
import pytest

from qdqbench.quantize.engine.trtexec import read
from qdqbench.quantize.engine.trtexec.read import kernel_ms, read_profile, read_times
from qdqbench.quantize.utils.errors import UserError

from ....support.fuzz import hold_to_one_sentence

MADE = Path(__file__).parents[3] / "golden" / "trtexec"  # by hand
READERS = {"times.json": read_times, "profile.json": read_profile}


def written(folder: Path, text: str) -> Path:
    (folder / "file.json").write_text(text)
    return folder / "file.json"


def test_times_are_those_of_each_query():
    times = read_times(MADE / "times.json")
    assert len(times.compute) == 120
    assert times.compute.min() > 0.6
    np.testing.assert_allclose(times.latency, times.h2d + times.compute + times.d2h, rtol=1e-4)
    assert (np.diff(times.start) > 0).all()


def test_a_profile_has_its_kernels_in_order_and_a_percentage_that_is_no_number():
    kernels = read_profile(MADE / "profile.json")
    assert "-nan" in (MADE / "profile.json").read_text()
    assert [kernel.average_ms for kernel in kernels] == [0.021, 0.05, 0.0]
    assert kernels[1].median_ms == 0.05


def test_kernels_of_one_name_are_added(tmp_path):
    path = written(tmp_path, '[{"name": "a", "ms": 1}, {"name": "b", "ms": 2}, {"name": "a", "ms": 3}]')
    assert kernel_ms(read_profile(path)) == {"a": 4, "b": 2}


@pytest.mark.parametrize(
    ("reader", "text", "said"),
    [
        (read_times, "[]", "1 to"),
        (read_times, '[{"computeMs": 1}]', "query 0 of .* has no startComputeMs"),
        (read_times, "[3]", "no startComputeMs"),
        (read_times, "{}", "must be a list"),
        (read_profile, '[{"count": 3}]', "has no kernels"),
        (read_profile, '[{"name": "a", "ms": true}]', "no kernel profile"),
        (read_profile, '[{"name": "a", "ms": -1}]', "no kernel profile"),
        (read_profile, '[{"name": "a", "ms": nan}]', "no kernel profile"),
        (read_profile, "[" * 100_000, "is not JSON"),
        (read_profile, "nothing", "is not JSON"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, reader, text, said):
    with pytest.raises(UserError, match=said):
        reader(written(tmp_path, text))


@pytest.mark.parametrize("reader", READERS.values())
def test_what_cannot_be_read_is_said(tmp_path, reader):
    with pytest.raises(UserError, match="No such file"):
        reader(tmp_path / "none.json")
    with pytest.raises(UserError, match="is no regular file"):
        reader(tmp_path)
    (tmp_path / "binary").write_bytes(b"\x00\xff\xfe")
    with pytest.raises(UserError, match="not text"):
        reader(tmp_path / "binary")


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MAX_BYTES", 100)
    with pytest.raises(UserError, match="at most 100"):
        read_profile(written(tmp_path, "[" + " " * 100 + "]"))


def test_a_file_of_many_empty_lists_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MAX_PARTS", 10)
    with pytest.raises(UserError, match="more than 10 lists"):
        read_profile(written(tmp_path, "[" + "[]," * 10 + "[]]"))


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_broken_files_end_in_one_sentence(tmp_path, name):
    sample = b"\n".join((MADE / name).read_bytes().split(b"\n")[:12])
    hold_to_one_sentence(READERS[name], [sample, sample + b"]"], tmp_path / "broken.json")
