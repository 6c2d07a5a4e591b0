"""Metrics for Prometheus: numbers in shared memory, summed over processes when they are asked for."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
STATUSES = ("200", "400", "404", "405", "408", "413", "415", "421", "422", "500", "503")


class Metric(NamedTuple):
    """A metric: its samples have labels, and a histogram several numbers each."""

    name: str
    kind: str
    about: str
    label: str = ""
    buckets: Sequence[float] = ()


COUNTED = [
    Metric("qdqbench_requests_total", "counter", "Answered requests.", "endpoint"),
    Metric("qdqbench_request_seconds", "histogram", "Seconds to an answer.", "endpoint", SECONDS),
    Metric("qdqbench_queue_seconds", "histogram", "Seconds that a row waits.", "model", SECONDS),
    Metric("qdqbench_engine_seconds", "histogram", "Seconds of a batch.", "model", SECONDS),
    Metric("qdqbench_batch_rows", "histogram", "Rows of a batch.", "model", ROWS),
    Metric("qdqbench_text_tokens_total", "counter", "Tokens of texts.", "model"),
    Metric("qdqbench_padding_tokens_total", "counter", "Tokens of padding.", "model"),
    Metric("qdqbench_watched_total", "counter", "Answers that FP32 gave too.", "verdict"),
    Metric("qdqbench_watch_limit", "gauge", "Share of other classes that the gate of the recipe allows."),
    Metric("qdqbench_queue_rows", "gauge", "Rows from arrival to answer."),
    Metric("qdqbench_workers", "gauge", "Processes that answer.", "process"),
    Metric("qdqbench_workers_lost_total", "counter", "Processes that ended or hung.", "process"),
]


class Metrics:
    """Places of all numbers, the same in all processes; label values are never what a client sent."""

    def __init__(self, paths: Sequence[str], models: Sequence[str]) -> None:
        labels = {
            "": [""],
            "model": [*models],
            "process": ["front", "engine"],
            "verdict": ["same", "other"],
            "endpoint": [*paths, "other"],
        }
        self.places: dict[tuple[str, str], int] = {}
        self.size, self._metrics = 0, list[tuple[Metric, str]]()
        for metric in COUNTED:
            for value in labels[metric.label]:
                wide = STATUSES if metric.name == "qdqbench_requests_total" else ("",)
                for status in wide:
                    self.places[metric.name, value + status] = self.size
                    self.size += len(metric.buckets) + 2 if metric.buckets else 1
                self._metrics.append((metric, value))

    def text(self, rows: Sequence[Any]) -> str:
        """Return the sums over processes in Prometheus' format."""
        sums, named, lines = [sum(column) for column in zip(*rows, strict=True)], "", list[str]()
        for metric, value in self._metrics:
            if metric.name != named:
                named = metric.name
                lines += [f"# HELP {named} {metric.about}", f"# TYPE {named} {metric.kind}"]
            lines += self._samples(metric, value, sums)
        return "\n".join(lines) + "\n"

    def _samples(self, metric: Metric, value: str, sums: Sequence[float]) -> Iterator[str]:
        name, label = metric.name, f'{metric.label}="{value}"' if metric.label else ""
        if name == "qdqbench_requests_total":
            for status in STATUSES:
                if number := sums[self.places[name, value + status]]:
                    yield f'{name}{{{label},status="{status}"}} {number}'
            return
        at, count = self.places[name, value], len(metric.buckets)
        if not count:
            yield f"{name}{{{label}}} {sums[at]}" if label else f"{name} {sums[at]}"
            return
        told = f"{label}," if label else ""
        bounds = [*map(str, metric.buckets), "+Inf"]
        for bound, total in zip(bounds, accumulate(sums[at : at + count + 1]), strict=True):
            yield f'{name}_bucket{{{told}le="{bound}"}} {total}'
        yield f"{name}_sum{{{label}}} {sums[at + count + 1]}"
        yield f"{name}_count{{{label}}} {sum(sums[at : at + count + 1])}"


class Counts:
    def __init__(self, metrics: Metrics, row: Any) -> None:
        self._places, self._row = metrics.places, row
        self._buckets = {metric.name: metric.buckets for metric in COUNTED}

    def add(self, name: str, value: str = "", number: float = 1.0) -> None:
        self._row[self._places[name, value]] += number

    def set(self, name: str, value: str, number: float) -> None:
        self._row[self._places[name, value]] = number

    def observe(self, name: str, value: str, number: float) -> None:
        at, buckets, row = self._places[name, value], self._buckets[name], self._row
        row[at + bisect_left(buckets, number)] += 1
        row[at + len(buckets) + 1] += number

    def observe_all(self, name: str, value: str, numbers: npt.NDArray[np.float64]) -> None:
        if len(numbers) == 1:
            self.observe(name, value, float(numbers[0]))
            return
        at, buckets, row = self._places[name, value], self._buckets[name], self._row
        for place, count in enumerate(np.bincount(np.searchsorted(buckets, numbers)).tolist()):
            row[at + place] += count
        row[at + len(buckets) + 1] += float(numbers.sum())
