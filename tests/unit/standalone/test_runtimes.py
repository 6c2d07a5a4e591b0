"""The runtimes of a deployed folder."""

import subprocess
import sys

import pytest

SOURCE = """
import sys
from qdqbench.quantize.standalone.runtimes import load_openvino
load_openvino().Core()
print([name for name in sys.modules if name.startswith("openvino_telemetry")])
"""


def test_openvino_is_loaded_without_its_telemetry():
    pytest.importorskip("openvino")
    told = subprocess.run(
        [sys.executable, "-c", SOURCE], capture_output=True, text=True, check=True, timeout=100
    )
    assert told.stdout.split() == ["[]"]
