"""Silence libraries that log, warn and draw bars: a run shows its own progress."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, Literal

Library = Literal["transformers", "datasets", "optuna"]
_LEVELS = {
    "transformers": {"transformers": logging.ERROR},
    "datasets": {"datasets": logging.CRITICAL, "huggingface_hub": logging.CRITICAL},  # logged, then raised
    "optuna": {"optuna": logging.ERROR},
}


@contextmanager
def unprinted() -> Iterator[None]:
    """Keep stdout empty, and filters of warnings as they are before the block."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        yield


@contextmanager
def quiet(library: Library) -> Iterator[None]:
    """Suppress progress bars, advice and deprecation notes of a library; all is as before afterwards."""
    with warnings.catch_warnings():
        bars = _bars(library)  # imports the library, which sets its own level then
        before = {logging.getLogger(name): logging.getLogger(name).level for name in _LEVELS[library]}
        for name, level in _LEVELS[library].items():
            logging.getLogger(name).setLevel(level)
        for hide, _ in bars:
            hide()
        warnings.simplefilter("ignore", Warning if library == "optuna" else FutureWarning)
        try:
            yield
        finally:
            for logger, level in before.items():
                logger.setLevel(level)
            for _, show in bars:
                show()


def _bars(library: Library) -> list[tuple[Callable[[], None], Callable[[], None]]]:
    if library == "transformers":
        from transformers.utils import logging as untyped

        bars: Any = untyped
        switch = bars.disable_progress_bar, bars.enable_progress_bar
        return [switch] if bars.is_progress_bar_enabled() else []
    if library == "optuna":
        import optuna  # noqa: F401

        return []
    from datasets import are_progress_bars_disabled as hidden
    from datasets import disable_progress_bars, enable_progress_bars
    from huggingface_hub.utils.tqdm import disable_progress_bars as hide_downloads
    from huggingface_hub.utils.tqdm import enable_progress_bars as show_downloads

    both = [(disable_progress_bars, enable_progress_bars), (hide_downloads, show_downloads)]
    return [] if hidden() else both
