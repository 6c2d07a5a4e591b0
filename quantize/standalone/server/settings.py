"""What is served, and how."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ENGINE, FP32 = "engine", "fp32"  # names of models


@dataclass(frozen=True)
class Settings:
    """Limits and sizes; None: as many as the machine suggests."""

    host: str = "127.0.0.1"
    port: int = 8000
    fronts: int | None = None
    engines: int | None = None
    batch_tokens: int = 16_384  # of an engine that needs no padding
    queue: int = 1024  # rows that a front holds at once for each engine
    timeout: float = 10.0  # s, of a request
    max_texts: int = 64
    max_characters: int = 20_000  # of a text
    body_bytes: int = 1 << 20
    watch: float = 0.0  # share of requests that FP32 answers too
    dimensions: Sequence[int] = ()  # that embeddings may be cut to


@dataclass(frozen=True)
class Served:
    """A model with its tokenizer; each process gets a copy."""

    name: str
    recipe: str
    made_with: str  # runtime and its version
    told: Mapping[str, Any]  # as model.json has it
    tokenizer: str  # JSON
    models: Mapping[str, Callable[[], Any]]  # by name: opens its `Infer`, in a process of its own
    max_drop: float = 0.0  # of the recipe's gate
    gpus: int = 0  # that the engine is for; 0: it runs on the CPU
    texts: Callable[[], Sequence[str]] = tuple  # of the run, on which a faster tokenizer must agree
    about: Mapping[str, Any] = field(default_factory=dict)  # further facts for /v1/model
    pages: Mapping[str, tuple[bytes, str]] = field(default_factory=dict)  # by path: content, its type
