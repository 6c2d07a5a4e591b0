"""Ctrl-C is heeded wherever it comes."""

import subprocess
import sys

CODE = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from qdqbench.quantize.machine import interrupt
interrupt.watch()
class Dies:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
try:
    Dies()
    time.sleep(20)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_in_a_destructor_it_comes_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "")
