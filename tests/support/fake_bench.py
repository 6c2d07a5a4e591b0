"""A bench without a device: systems whose times and answers are known, on a clock that only they turn."""

import json
import math
from types import SimpleNamespace

import numpy as np
from typer.testing import CliRunner

from qdqbench.cli.app import app
from qdqbench.eval.bench.measure import SystemRun
from qdqbench.eval.bench.results import BenchRow, BenchTarget
from qdqbench.eval.bench.systems import BenchPlan, Work
from qdqbench.eval.bench.target import GRAPHS, BatchedSplit, Target
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.system.gpu import Gpu

PLAN = BenchPlan(
    device="gpu", batches=[1, 8], lengths=[128], dataset=None, input_sets=8, splits=(), streams=[1, 2],
    rounds=5, duration_s=0.1, iterations=30, baselines=True, fp32=True, engine_shapes="exact", seed=0,
)  # fmt: skip
CLOCKS = {"clock_mhz": 1980.0, "power_w": 512.5, "temperature_c": 41.0}


class FakeClock:
    """Stands in for the module `time`: each look takes a second; it writes down how long it slept."""

    def __init__(self, log):
        self.log, self.now = log, -1.0

    def monotonic(self):
        self.log.append("timed")
        self.now += 1
        return self.now

    process_time = staticmethod(lambda: 0.0)

    def sleep(self, seconds):
        self.log.append(seconds)


class FakeLane:
    """Gives the logits of the input set that it was fed; after `broken_after` launches they are NaN."""

    def __init__(self, logits=None, ms=1.0, broken_after=math.inf):
        rng = np.random.default_rng(0)
        self.logits = [rng.normal(size=(2, 3)) for _ in range(2)] if logits is None else logits
        self.ms, self.broken_after, self.input_sets = ms, broken_after, 2
        self.fed, self.launches = [], 0

    def feed(self, number):
        self.fed.append(number)

    def launch(self):
        self.launches += 1

    def fetch(self):
        found = np.asarray(self.logits[self.fed[-1] % len(self.logits)], dtype=np.float32)
        return found * (math.nan if self.launches > self.broken_after else 1)


class FakeTimer:
    """Each launch takes the milliseconds of its lane; writes down who ran, or raises."""

    def __init__(self, log=None, name="", error=None):
        self.log, self.name, self.error = [] if log is None else log, name, error

    def latencies(self, lane, count):
        if self.error:
            raise self.error
        self.log.append((self.name, count))
        for _ in range(count):
            lane.launch()
        return [lane.ms] * count

    def wall(self, lanes, count):
        return count * lanes[0].ms / 1000  # lanes run at the same time


def precision_of(name):
    return name if name in ("int8", "fp32") else "fp16"


def fake_system(name, ms=1.0, lane=None, *, log=None, error=None, precision=None, **more):
    """Return a system of two streams."""
    lanes = [FakeLane(ms=ms), FakeLane(ms=ms)] if lane is None else [lane] * 2
    row, timer = BenchRow(system=name, status="done"), FakeTimer(log, name, error)
    return SystemRun(row, precision or precision_of(name), timer, more.pop("lanes", lanes), **more)


def missing_system(name, status, reason, **more):
    return SystemRun(BenchRow(system=name, status=status, reason=reason, **more), "", FakeTimer())


class FakeMonitor:
    """A GPU that is read, or not."""

    def __init__(self, reason=None):
        self.reason = reason

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def during(self, windows):
        return {} if self.reason else CLOCKS


def fake_device(prepare, **more):
    """Return a GPU on which `prepare` gives the systems of a config."""
    gpu = Gpu("NVIDIA H200", "9.0", "570.1")
    return Work(prepare, ("tensorrt_rtx", "1.4.0.76"), gpu, more.pop("monitor", FakeMonitor()), **more)


def fake_target(recipe="bert-int8-linears", folder=None, *, kind="shape", **session):
    """Return a target of a model that is not there; in a folder with empty graphs."""
    about = BenchTarget(
        kind=kind, name="bert-base", random_weights=kind == "shape", calibration="", files={},
        shape={"vocabulary": 500, "positions": 512},
    )  # fmt: skip
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    plan = SimpleNamespace(attention=())
    target = Target(SimpleNamespace(recipe=recipe, folder=folder, plan=plan, **session), about)
    if folder:
        target.session.target = choose_target(recipe)
        folder.mkdir(exist_ok=True)
        for path in (folder / name for name in GRAPHS.values()):
            if not path.exists():  # a form of a graph is as old as its graph
                path.touch()
    return target


def split_of(*shapes, rows=None, **more):
    """Batches of zeros without padding; all their rows count, or so many of each."""
    batches = [
        {"input_ids": np.zeros(shape, dtype=np.int64), "attention_mask": np.ones(shape, dtype=np.int64)}
        for shape in shapes
    ]
    counts = list(rows or [shape[0] for shape in shapes])
    tokens = sum(rows * length for rows, length in shapes)
    return BatchedSplit("sst2", 32, batches, counts, sum(counts), more.pop("tokens", tokens), **more)


WORD_COUNTS = [1, 2, 3, 9, 9, 20, 100, *(number % 31 + 1 for number in range(33))]


def write_texts(folder):
    """A validation split of SST-2 with sentences of so many words."""
    lines = [json.dumps({"sentence": "abc " * count, "label": count % 2}) for count in WORD_COUNTS]
    (folder / "sst2").mkdir(parents=True)
    (folder / "sst2" / "validation.jsonl").write_text("\n".join(lines))
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))
