"""What a server counts, as Prometheus reads it."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server; label values are names of ours, never what a client sent."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "qdqbench_requests", "Answered requests.", ["endpoint", "status"], registry=registry
        )
        self.seconds = Histogram(
            "qdqbench_request_seconds", "From a request's head to its answer.", ["endpoint"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.waited = Histogram(
            "qdqbench_queue_seconds", "That a row waited for an engine.", ["model"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.ran = Histogram(
            "qdqbench_engine_seconds", "That an engine took for a batch.", ["model"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.rows = Histogram(
            "qdqbench_batch_rows", "Rows of a batch.", ["model"], buckets=ROWS, registry=registry
        )
        self.tokens = Counter("qdqbench_tokens", "Tokens of batches.", ["model", "kind"], registry=registry)
        self.lost = Counter(
            "qdqbench_workers_lost", "Worker processes that ended or hung.", ["model"], registry=registry
        )
        self._waiting = Gauge("qdqbench_queue_rows", "Rows that wait.", ["model"], registry=registry)
        self._alive = Gauge("qdqbench_workers", "Worker processes that answer.", ["model"], registry=registry)

    def watch(self, model: str, waiting: Callable[[], float], alive: Callable[[], float]) -> None:
        """Read the rows that wait for a model, and its workers, whenever somebody asks."""
        self._waiting.labels(model).set_function(waiting)
        self._alive.labels(model).set_function(alive)
        self.lost.labels(model)  # shown from the start

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)
