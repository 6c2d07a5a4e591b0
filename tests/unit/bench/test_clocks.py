"""Clock and power from NVML: matched to who ran, and absent in words."""

import time

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.bench.run import GpuMonitor, busy_notes, cpu_now


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(100, 2000)), max_size=30),
    st.floats(0, 10),
    st.floats(0, 5),
)
def test_medians_are_of_the_windows_alone(points, start, width):
    monitor = GpuMonitor(None)
    monitor.samples = [(when, {"clock_mhz": clock, "temperature_c": 40.0}) for when, clock in points]
    inside = sorted(clock for when, clock in points if start <= when <= start + width)
    medians = monitor.during([(start, start + width)])
    if not inside:
        assert medians == {}
    else:
        assert inside[0] <= medians.pop("clock_mhz") <= inside[-1]
        assert medians == {"temperature_c": 40.0}


class Nvml:
    """What NVML answers of one GPU, GPU-7, in its own units; an error is raised."""

    def __init__(self, monkeypatch):
        self.calls, self.clock, self.power, self.temperature = [], 1755, 400500, 50
        for name, function in {
            "Init": lambda: self.calls.append("init"),
            "Shutdown": lambda: self.calls.append("shutdown"),
            "DeviceGetHandleByUUID": self.handle,
            "DeviceGetHandleByIndex": self.handle,
            "DeviceGetClockInfo": self.tell("clock", pynvml.NVML_CLOCK_SM),
            "DeviceGetPowerUsage": self.tell("power"),
            "DeviceGetTemperature": self.tell("temperature", pynvml.NVML_TEMPERATURE_GPU),
        }.items():
            monkeypatch.setattr(pynvml, f"nvml{name}", function)

    def handle(self, name):
        if name not in ("GPU-7", 0):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def tell(self, name, *wanted):
        def answer(*given):
            assert given == ("handle", *wanted)
            if isinstance(value := getattr(self, name), Exception):
                raise value
            return value

        return answer


@pytest.fixture
def nvml(monkeypatch):
    return Nvml(monkeypatch)


def wait_for(monitor, start):
    deadline = time.monotonic() + 20
    while monitor.during([(start, time.monotonic())]) == {} and time.monotonic() < deadline:
        time.sleep(0.02)
    return monitor.during([(start, time.monotonic())])


@pytest.mark.parametrize(("uuid", "power"), [("GPU-7", 400.5), (None, 400.5), ("GPU-7", None)])
def test_the_gpu_is_read_in_the_background_until_the_end(nvml, uuid, power):
    """A value that this GPU does not tell is left out."""
    told = {"clock_mhz": 1755.0, "temperature_c": 50.0} | ({"power_w": power} if power else {})
    if power is None:
        nvml.power = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    with GpuMonitor(uuid) as monitor:
        assert wait_for(monitor, time.monotonic() - 0.01) == told
        assert monitor.during([(0.0, 1.0)]) == {}
        thread = monitor._thread
    assert monitor.reason is None
    assert not thread.is_alive()
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.parametrize(("uuid", "reason"), [("GPU-7", "GPU is lost"), ("GPU-8", "Not Found")])
def test_a_gpu_that_is_not_read_gives_its_reason(nvml, uuid, reason):
    nvml.clock = nvml.power = nvml.temperature = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    with GpuMonitor(uuid) as monitor:
        time.sleep(0.02)
    assert (monitor.samples, monitor.reason) == ([], f"NVML gave no reading: {reason}")
    assert nvml.calls[-1] == "shutdown"


def test_no_driver(nvml, monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with GpuMonitor(None) as monitor:
        assert monitor.during([(0, time.monotonic())]) == {}
    assert monitor.reason == "NVML does not start (NVML Shared Library Not Found)"
    assert nvml.calls == []


def test_a_busy_machine_is_told(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.3, 9, 9))
    assert busy_notes() == []
    monkeypatch.setattr("os.getloadavg", lambda: (3.25, 0, 0))
    (said,) = busy_notes()
    assert said.startswith("load average 3.25 before it began")
    assert cpu_now().load_before == 3.25
