"""Engines that are files with a latency in them, for tests of what is built and timed without a GPU."""

import json
from pathlib import Path

import numpy as np

from qdqbench.eval.bench import measure
from qdqbench.quantize.engine.build import list_gemms

from .fake_bench import FakeTimer
from .records import engine_result

TWIN_MS = 2.0


class Bound:
    def __init__(self, engine, shape):
        self.engine, self.shape = engine, shape


class Engine:
    def __init__(self, path, onnx, *, runtime_cache):
        assert all(other.closed for other in opened if other.cache == runtime_cache)
        self.int8 = json.loads(path.read_text())["int8"]
        assert onnx.is_file()
        self.path, self.cache, self.closed = path, runtime_cache, False
        opened.append(self)

    def bind(self, batch, length):
        return Bound(self, (batch, length))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True


class Lane:
    """Latency falls with every product in INT8; outputs follow the inputs."""

    def __init__(self, bound, sets):
        self.bound, self.sets, self.input_sets, self.number = bound, sets, len(sets), 0
        rows = sets[0]["input_ids"].shape
        assert rows == bound.shape
        self.ms = TWIN_MS * rows[0] / (1 + 0.05 * bound.engine.int8)

    def feed(self, number):
        self.number = number % len(self.sets)

    def launch(self):
        assert not self.bound.engine.closed

    def fetch(self):
        ids = self.sets[self.number]["input_ids"].astype(np.float32)
        if self.bound.engine.int8 and spoilt:
            return np.full((len(ids), 2), np.nan, np.float32)
        return np.stack([ids.sum(axis=1), ids.mean(axis=1)], axis=1)


opened: list[Engine] = []
spoilt: list[bool] = []  # anything in it: INT8 engines give NaN
unproven: list[bool] = []  # anything in it: a product does not run in INT8


def build(onnx_path, engine_path, *, expected_gemms, expected_attention, layers_path, profiles, **_):
    assert profiles
    assert set(expected_gemms) <= set(list_gemms(onnx_path))
    engine_path.write_text(json.dumps({"int8": len(expected_gemms)}))
    Path(layers_path).write_text("[]")
    lost = list(expected_gemms)[: len(unproven)]
    return engine_result(
        len(expected_gemms),
        backend="fake",
        file=engine_path.name,
        int8_gemms=len(expected_gemms) - len(lost),
        not_int8=lost,
        attention_fused=expected_attention,
        attention_int8=expected_attention,
        expected_attention_int8=expected_attention,
    )


def install(monkeypatch):
    """Take the place of what touches a device in `measure`; forget what happened."""
    opened.clear()
    spoilt.clear()
    unproven.clear()
    fakes = {"build": build, "DeviceLane": Lane, "to_gpu": dict, "CudaTimer": FakeTimer}
    for name, fake in (fakes | {"WallTimer": FakeTimer, "ON_CPU": measure.ON_GPU}).items():
        monkeypatch.setattr(measure, name, fake)
    monkeypatch.setattr(
        measure,
        "load_engine",
        lambda session, path, graph: Engine(path, graph, runtime_cache=path.with_suffix(".cache")),
    )
