"""Capture CUDA graphs of torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def capture_graph(graph: Any, **options: Any) -> Iterator[None]:
    """Capture into a CUDAGraph, with options of `torch.cuda.graph`.

    Garbage is collected before or after: freeing another model's graphs invalidates a capture.
    """
    import torch

    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if enabled:
            gc.enable()
