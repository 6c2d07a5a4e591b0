"""A process that runs a model for the server: `python -m qdqbench.quantize.serve.worker`.

It reads frames from stdin and answers on stdout, so it ends when the server does, however that ends. What
libraries print goes to stderr.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from qdqbench.quantize.core.arrays import Array, Float32, Int64
from qdqbench.quantize.core.errors import QdqError
from qdqbench.quantize.serve.frames import Head, packed, read

Run = Callable[[Mapping[str, Int64]], Float32]


def main(opened: Callable[[Head], Run] | None = None) -> None:
    """Open the model that the first message orders, say so, then answer batch after batch.

    Args:
        opened: takes the order and gives what runs a batch; None: `open_model`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group: the server ends its workers
        signal.signal(number, signal.SIG_IGN)
    stdin, stdout = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if (first := read(stdin)) is None:
        return
    order = first[0]
    if order.get("cores") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, order["cores"])
    try:
        run = (opened or open_model)(order)
        warm_up(run, order["warm"])
    except Exception as error:
        _send(stdout, {"error": _sentence(error), "exit": getattr(error, "exit_code", 1)})
        return
    _send(stdout, {"ready": True})
    while (message := read(stdin)) is not None:
        head, batch = message
        start = time.perf_counter()
        try:
            made = run(batch)
        except Exception as error:  # the server replaces a process whose engine failed
            _send(stdout, {"id": head["id"], "error": _sentence(error)})
            return
        _send(stdout, {"id": head["id"], "seconds": time.perf_counter() - start}, {"answers": made})


def open_model(order: Head) -> Run:
    """What an order names: the engine of a run, or with `fp32` its FP32 twin, in that CPU runtime.

    Raises:
        UserError, MissingDevice: as of `runtime.opened`.
    """
    from qdqbench.quantize.runtime.opened import open_runner, open_twin

    graph, outputs, engine = Path(order["onnx"]), order["outputs"], Path(order["engine"])
    if order["fp32"]:
        return open_twin(graph, order["fp32"], outputs)
    cache = engine.parent / "runtime.cache"
    return open_runner(engine, graph, pad_id=order["pad_id"], runtime_cache=cache, outputs=outputs)


def warm_up(run: Run, shapes: Sequence[tuple[int, int]]) -> None:
    """Run each shape (batch, length) once, so that no request waits for what is compiled at first use."""
    import numpy as np

    for shape in shapes:
        ids = np.zeros(shape, dtype=np.int64)
        run({"input_ids": ids, "attention_mask": ids + 1, "token_type_ids": ids})


def _send(stream: BinaryIO, head: Head, arrays: Mapping[str, Array] | None = None) -> None:
    stream.write(packed(head, arrays))
    stream.flush()


def _sentence(error: Exception) -> str:
    told = " ".join(str(error).split())[:400]
    return told if isinstance(error, QdqError) else f"{type(error).__name__}: {told}"


if __name__ == "__main__":
    main()
    sys.exit(0)
