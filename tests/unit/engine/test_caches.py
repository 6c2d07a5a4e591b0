"""The timing cache of TensorRT's builder, on a fake builder config; TensorRT-RTX has none in effect."""

import json

import pytest

from qdqbench.quantize.engine import backend
from qdqbench.quantize.engine.backend import TimingCache, describe_origin, read_cache, write_cache
from qdqbench.quantize.utils.system.gpu import Gpu

HERE = describe_origin("tensorrt", "10.16.0", Gpu("L4", "8.9", "580.1"))


class Cache:
    def __init__(self, content):
        self.content = content

    def serialize(self):
        return self.content + b"+new"


class Config:
    """Refuses blobs that begin with `bad` when they are read, `other` when they are set."""

    cache = None

    def create_timing_cache(self, blob):
        return None if blob.startswith(b"bad") else Cache(blob)

    def set_timing_cache(self, cache, ignore_mismatch):
        assert ignore_mismatch is False
        if cache.content.startswith(b"other"):
            return False
        self.cache = cache
        return True


def test_timings_are_kept_and_used_again(tmp_path):
    path = tmp_path / "engine" / "timing.cache"
    first, second = Config(), Config()
    timings = TimingCache(first, path, HERE)
    assert first.cache.content == b""
    assert timings.save() == []
    assert read_cache(path, HERE) == (b"+new", None)
    TimingCache(second, path, HERE)
    assert second.cache.content == b"+new"


@pytest.mark.parametrize("blob", [b"bad", b"other"])
def test_what_the_builder_refuses_is_noted_and_replaced(tmp_path, blob):
    path, config = tmp_path / "timing.cache", Config()
    write_cache(path, HERE, blob)
    timings = TimingCache(config, path, HERE)
    assert config.cache.content == b""
    assert timings.save() == ["timing.cache is ignored and made anew: the builder refuses it"]
    assert read_cache(path, HERE) == (b"+new", None)


def test_another_version_is_noted_before_the_builder_sees_it(tmp_path):
    path, config = tmp_path / "timing.cache", Config()
    write_cache(path, HERE | {"version": "10.14.1"}, b"old")
    notes = TimingCache(config, path, HERE).save()
    assert config.cache.content == b""
    assert notes == ["timing.cache is ignored and made anew: version was 10.14.1 and is 10.16.0"]


def test_nothing_is_written_when_nothing_changed(tmp_path):
    path = tmp_path / "timing.cache"
    assert backend.keep(path, HERE, b"same", b"same") == []
    assert backend.keep(path, HERE, None, b"") == []
    assert not path.exists()


def test_the_file_says_where_it_is_from(tmp_path):
    path = tmp_path / "timing.cache"
    write_cache(path, HERE, b"a\nb\n")
    assert json.loads(path.read_bytes().split(b"\n")[0])["origin"] == {
        "backend": "tensorrt",
        "version": "10.16.0",
        "gpu": "L4",
        "compute_capability": "8.9",
        "driver": "580.1",
    }
    assert read_cache(path, HERE) == (b"a\nb\n", None)


def test_a_folder_in_the_place_of_the_file(tmp_path):
    (tmp_path / "timing.cache").mkdir()
    blob, note = read_cache(tmp_path / "timing.cache", HERE)
    assert blob == b""
    assert "cannot be read" in note


def test_no_gpu_has_an_origin_too():
    assert set(describe_origin("tensorrt_rtx", "1.7", None).values()) == {
        "tensorrt_rtx",
        "1.7",
        "none",
        "unknown",
    }
