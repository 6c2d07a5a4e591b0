"""The timing cache of TensorRT's builder, on a fake builder config; TensorRT-RTX has none in effect."""

import json

import pytest

from qdqbench.quantize.engine.backend import CacheFile, set_timings
from qdqbench.quantize.utils.system.gpu import Gpu


def file_at(path):
    return CacheFile(path, "tensorrt", "10.16.0", Gpu("L4", "8.9", "580.1"))


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
    first, second, timings = Config(), Config(), file_at(path)
    cache = set_timings(first, timings)
    assert first.cache.content == b""
    timings.keep(cache.serialize())
    assert (file_at(path).blob, timings.notes) == (b"+new", [])
    set_timings(second, file_at(path))
    assert second.cache.content == b"+new"


@pytest.mark.parametrize("blob", [b"bad", b"other"])
def test_what_the_builder_refuses_is_noted_and_replaced(tmp_path, blob):
    path, config = tmp_path / "timing.cache", Config()
    file_at(path).keep(blob)
    timings = file_at(path)
    timings.keep(set_timings(config, timings).serialize())
    assert config.cache.content == b""
    assert timings.notes == ["timing.cache is ignored and made again: the builder refuses it"]
    assert file_at(path).blob == b"+new"


def test_the_file_says_where_it_is_from_and_is_written_for_news_only(tmp_path):
    path = tmp_path / "timing.cache"
    file_at(path).keep(None)
    assert not path.exists()
    file_at(path).keep(b"a\nb\n")
    origin = {"backend": "tensorrt", "version": "10.16.0"}
    origin |= {"gpu": "L4", "compute_capability": "8.9", "driver": "580.1"}
    assert json.loads(path.read_bytes().split(b"\n")[0])["origin"] == origin
    same = file_at(path)
    path.unlink()
    same.keep(b"a\nb\n")
    assert not path.exists()


def test_a_folder_in_the_place_of_the_file_and_no_gpu(tmp_path):
    (tmp_path / "timing.cache").mkdir()
    found = CacheFile(tmp_path / "timing.cache", "tensorrt_rtx", "1.7", None)
    assert found.blob == b""
    assert "cannot be read" in found.notes[0]
