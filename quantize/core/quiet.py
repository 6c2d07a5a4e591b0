"""Silence of libraries that log, warn and draw bars on their own: a run shows its progress itself."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

# `datasets` and the hub log what they raise right after
_LEVELS = {
    "transformers": {"transformers": logging.ERROR},
    "datasets": {"datasets": logging.CRITICAL, "huggingface_hub": logging.CRITICAL},
}


@contextmanager
def quiet(library: Literal["transformers", "datasets"]) -> Iterator[None]:
    """No progress bars, advice or notes on its own future from a library; all is as before afterwards."""
    if library == "transformers":
        from transformers.utils import logging as untyped

        bars: Any = untyped
        shown, hide, show = (
            bars.is_progress_bar_enabled(),
            [bars.disable_progress_bar],
            [bars.enable_progress_bar],
        )
    else:
        import datasets
        from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

        shown = not datasets.are_progress_bars_disabled()
        hide = [datasets.disable_progress_bars, disable_progress_bars]
        show = [datasets.enable_progress_bars, enable_progress_bars]
    loggers = {logging.getLogger(name): level for name, level in _LEVELS[library].items()}
    before = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    if shown:
        for switch in hide:
            switch()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
        if shown:
            for switch in show:
                switch()
