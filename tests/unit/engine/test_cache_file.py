"""Calibration caches, in the format that TensorRT's calibrators write."""

import struct

import pytest

from qdqbench.quantize.engine.cache_import import is_cache, read_cache_file
from qdqbench.quantize.utils.errors import UserError


def line(name: str, scale: float) -> str:
    return f"{name}: {struct.pack('>f', scale).hex()}"


def written(path, *lines: str, head: str = "TRT-8601-EntropyCalibration2"):
    path.write_text("\n".join([head, *lines, ""]))
    return path


def test_scales_are_those_that_were_written(tmp_path):
    path = written(
        tmp_path / "calibration.cache", "input: 3c010a14", line("/a/MatMul:0", 0.25), "zeros: 00000000"
    )
    cache = read_cache_file(path)
    assert is_cache(path.read_bytes())
    assert (cache.version, cache.calibrator) == ("8.6.1", "EntropyCalibration2")
    assert cache.scales["input"] == pytest.approx(1 / 127, rel=1e-3)
    assert cache.amax["input"] == pytest.approx(1.0, rel=1e-3)
    assert (cache.scales["/a/MatMul:0"], cache.scales["zeros"]) == (0.25, 0.0)


@pytest.mark.parametrize(
    ("head", "version"),
    [("TRT-7103-MinMaxCalibration", "7.1.3"), ("TRT-100600-EntropyCalibration2", "10.6.0"),
     ("TRT-8531-EntropyCalibration2\r", "8.5.31")],
)  # fmt: skip
def test_the_version_is_that_of_the_first_line(tmp_path, head, version):
    assert read_cache_file(written(tmp_path / "c", line("x", 1.0), head=head)).version == version


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["x: 3c010a1"], "line 2"),
        (["x: 3c010a14", "3c010a14"], "line 3"),
        ([line("x", float("nan"))], "line 2"),
        ([line("x", -1.0)], "line 2"),
        (["x\x1b[2J: 3c010a14"], "line 2"),
        (["n" * 5000 + ": 3c010a14"], "line 2"),
        ([], "without tensors"),
    ],
)
def test_what_is_no_scale_is_named(tmp_path, lines, told):
    with pytest.raises(UserError, match=told):
        read_cache_file(written(tmp_path / "c", *lines))


def test_another_file_is_refused(tmp_path):
    for data in (b"", b"PK\x03\x04", b"\x80\x04\x95", b"{}", b"TRT-"):
        (tmp_path / "c").write_bytes(data)
        assert not is_cache(data)
        with pytest.raises(UserError, match="no calibration cache"):
            read_cache_file(tmp_path / "c")
    with pytest.raises(UserError, match="cannot read"):
        read_cache_file(tmp_path / "missing")
