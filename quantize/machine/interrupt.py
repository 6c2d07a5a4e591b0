"""Ctrl-C that holds though a library swallows the exception, as imports do that try what is installed."""

import signal
import sys
import threading
from typing import Any

AGAIN_S = 0.05
_asked = threading.Event()


def watch() -> None:
    """Remember Ctrl-C from now on; in the main thread, unless the signal is ignored or taken."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_signal)
        sys.unraisablehook = _again


def ignore() -> None:
    """From now on, as the process ends already; a no-op outside of the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def raise_if_interrupted() -> None:
    """Stop here if Ctrl-C was pressed before.

    Raises:
        KeyboardInterrupt: it was.
    """
    if _asked.is_set():
        _asked.clear()
        raise KeyboardInterrupt


def _again(found: "sys.UnraisableHookArgs") -> None:
    """Python drops and prints what is raised while an object is destroyed: Ctrl-C then comes again."""
    if isinstance(found.exc_value, KeyboardInterrupt):
        main = threading.main_thread().ident
        timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))
        timer.daemon = True
        timer.start()
    else:
        sys.__unraisablehook__(found)


def _on_signal(number: int, frame: Any) -> None:
    _asked.set()
    raise KeyboardInterrupt
