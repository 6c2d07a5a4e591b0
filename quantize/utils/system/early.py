"""Exit of a process that is interrupted while it still imports; loads next to nothing, to be ready early."""

import os
import signal
from typing import Any

BEGINS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}  # as Python starts


def end_at_once(number: int, frame: Any) -> None:
    os.write(2, b"qdqbench: interrupted before it began; nothing was changed\n")
    os._exit(128 + number)


def watch_early() -> None:
    """End at once at Ctrl-C and SIGTERM, unless one is ignored or taken; until `Interruption.watch`."""
    for number, handler in BEGINS.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, end_at_once)
