"""Prometheus metrics of a server: one process writes its own, and each can show the sum of all."""

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

SHARED = "PROMETHEUS_MULTIPROC_DIR"  # folder of values; read when prometheus_client is imported
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one process; label values are our own names, never what a client sent."""

    def __init__(self) -> None:
        self._registry = to = CollectorRegistry()
        self.requests = Counter(
            "qdqbench_requests", "Answered requests.", ["endpoint", "status"], registry=to
        )
        self.seconds = Histogram(
            "qdqbench_request_seconds",
            "Seconds to an answer.",
            ["endpoint"],
            buckets=SECONDS,
            registry=to,
        )
        self.waited = Histogram(
            "qdqbench_queue_seconds", "Seconds that a row waits.", ["model"], buckets=SECONDS, registry=to
        )
        self.ran = Histogram(
            "qdqbench_engine_seconds", "Seconds of a batch.", ["model"], buckets=SECONDS, registry=to
        )
        self.rows = Histogram("qdqbench_batch_rows", "Rows of a batch.", ["model"], buckets=ROWS, registry=to)
        self.tokens = Counter("qdqbench_tokens", "Tokens of batches.", ["model", "kind"], registry=to)
        self.replaced = Counter("qdqbench_workers_lost", "Worker processes that ended or hung.", registry=to)
        self.queued = Gauge(
            "qdqbench_queue_rows", "Rows from arrival to answer.", registry=to, multiprocess_mode="livesum"
        )
        self.workers = Gauge(
            "qdqbench_workers", "Worker processes that answer.", registry=to, multiprocess_mode="livesum"
        )

    def text(self) -> bytes:
        """Return the values of all worker processes in Prometheus' text format."""
        if SHARED not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
