"""Fixtures that are dear enough to make once, and no deadlines: a busy machine is no failure."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny BERT; never changed by a test, copy it to break it."""
    from .support.tiny_bert import write_tiny_bert

    return write_tiny_bert(tmp_path_factory.mktemp("tiny-bert"))
