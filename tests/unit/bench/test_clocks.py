"""Clock and power from nvidia-smi: parsed, matched to who ran, and absent in words."""

import math
import stat
import sys
import time
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.bench.clocks import Clocks, GpuMonitor, Sample, medians, parse


def stamp(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]


def test_a_line_of_nvidia_smi():
    now = time.time()
    found = parse(f"{stamp(now)}, 1980, 612.34, 45\n")
    assert found is not None
    assert math.isclose(found.time, now, abs_tol=0.002)
    assert (found.clock_mhz, found.power_w, found.temperature_c) == (1980.0, 612.34, 45.0)


@pytest.mark.parametrize("missing", ["[N/A]", "[Not Supported]", "[Unknown Error]", ""])
def test_what_the_gpu_does_not_tell_is_none(missing):
    found = parse(f"{stamp(0)}, 1980, {missing}, 45")
    assert found is not None
    assert found.power_w is None
    assert found.clock_mhz == 1980.0


@pytest.mark.parametrize(
    "line", ["", "No devices were found", "timestamp, 1, 2, 3", "1, 2, 3", "a, b, c, d, e"]
)
def test_other_lines_are_no_samples(line):
    assert parse(line) is None


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(100, 2000)), max_size=30),
    st.floats(0, 10),
    st.floats(0, 5),
)
def test_medians_are_of_the_windows_alone(points, start, width):
    samples = [Sample(when, clock, None, 40.0) for when, clock in points]
    inside = sorted(clock for when, clock in points if start <= when <= start + width)
    found = medians(samples, [(start, start + width)])
    if not inside:
        assert found == Clocks()
    else:
        assert inside[0] <= found.clock_mhz <= inside[-1]
        assert found.power_w is None
        assert found.temperature_c == 40.0


SMI = """#!{python}
import sys, time
from datetime import datetime
assert "--id=GPU-7" in sys.argv, sys.argv
assert "--query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu" in sys.argv
while True:
    print(datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3] + ", 1755, 400.5, 50", flush=True)
    time.sleep(0.02)
"""


def script(folder, text):
    path = folder / "nvidia-smi"
    path.write_text(text.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return (str(path),)


def test_a_background_process_is_read_and_ended(tmp_path):
    with GpuMonitor("GPU-7", script(tmp_path, SMI)) as monitor:
        start, deadline = time.time() - 0.01, time.time() + 20
        while monitor.during([(start, time.time())]) == Clocks() and time.time() < deadline:
            time.sleep(0.02)
        assert monitor.during([(start, time.time())]) == Clocks(1755.0, 400.5, 50.0)
        assert monitor.during([(0.0, 1.0)]) == Clocks()
        process = monitor._process
    assert monitor.reason is None
    assert process is not None
    assert process.poll() is not None


def test_a_process_that_fails_gives_its_reason(tmp_path):
    text = "#!{python}\nprint('No devices were found')\nraise SystemExit(6)\n"
    with GpuMonitor(None, script(tmp_path, text)) as monitor:
        assert monitor._thread is not None
        monitor._thread.join()
    assert monitor.reason is not None
    assert "gave no reading: No devices were found" in monitor.reason


def test_no_nvidia_smi():
    with GpuMonitor(None, ("no-such-nvidia-smi",)) as monitor:
        assert monitor.during([(0, time.time())]) == Clocks()
    assert monitor.reason == "no-such-nvidia-smi is not installed"
