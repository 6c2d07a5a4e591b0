import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from qdqbench.quantize.utils.system import cpu
from qdqbench.quantize.utils.system.process import measure_cost, use_passive_wait


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "_CGROUPS", tmp_path)
    monkeypatch.setattr(cpu, "usable_cores", lambda: [0, 1, 2, 3])
    return tmp_path


@pytest.mark.parametrize(
    ("given", "cores"),
    [("max", None), ("150000", 2), ("5000", 1), ("400000", None), ("-1", None), ("250000", 3)],
)
def test_a_quota_counts_where_it_is_less_than_the_cores(given, cores, cgroups):
    assert cpu.quota() is None
    (cgroups / "cpu").mkdir()  # of the older cgroups
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text(f"{given}\n")
    (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu.quota() == cores
    (cgroups / "cpu.max").write_text(f"{given} 100000\n")
    assert cpu.quota() == cores


@pytest.mark.parametrize("path", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_limits_the_memory(path, cgroups):
    whole = cpu.find_memory()
    assert whole > 1 << 20
    (cgroups / path).parent.mkdir(exist_ok=True)
    for given, bytes_of in (("max", whole), ("9223372036854771712", whole), ("1048576", 1 << 20)):
        (cgroups / path).write_text(f"{given}\n")
        assert cpu.find_memory() == bytes_of


def test_threads_sleep_and_what_is_set_stays(cgroups):
    environ = {}
    use_passive_wait(environ)
    assert environ == {"OMP_WAIT_POLICY": "PASSIVE"}
    (cgroups / "cpu.max").write_text("100000 100000\n")
    use_passive_wait(environ)
    assert environ == {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    environ = {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "3"}
    use_passive_wait(environ)
    assert environ == {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "3"}


def python(code, **more):
    told = {"capture_output": True, "text": True} | more
    return subprocess.run([sys.executable, "-c", code], check=False, timeout=60, **told)


POLICY = """
import os, sys
from qdqbench.cli import app
app.main = lambda: print(os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules)
sys.argv[1:] = ["{}", "--help"]
app.program()
"""
CYCLES = """
import gc
from qdqbench.quantize.utils.system import process
process.freeze_gc()
assert not gc.get_freeze_count()  # a program of others is left alone
process.relax_gc()
found = []
gc.callbacks.append(lambda phase, info: found.append(phase))
kept = [[] for _ in range(500_000)]
print(len(found))
process.freeze_gc()
print(gc.get_freeze_count() > 500_000)
kept += [[] for _ in range(50_000)]
print(len(found))
kept += [[] for _ in range(60_000)]
print(len(found))  # start and stop of one look
"""
# a destructor of C that kills, as one of a library that calls another which is gone
DESTRUCTORS = """
import atexit, ctypes, sys
from qdqbench.cli import app
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
atexit.register(print, "registered")
def main():
    {}
app.main = main
app.program()
"""
DESTRUCTOR = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from qdqbench.quantize.utils.system.process import interruption
interruption.watch()
class Dies:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
try:
    Dies()
    time.sleep(20)
except KeyboardInterrupt:
    sys.exit(130)
"""
EARLY = """
import builtins, os, signal
real = builtins.__import__
signal.signal(signal.SIGINT, signal.default_int_handler)
def importing(name, *rest):
    if name == "typer":
        os.kill(os.getpid(), {})
    return real(name, *rest)
builtins.__import__ = importing
from qdqbench.__main__ import start
start()
"""
SWALLOWED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from qdqbench.cli import app
def invoke():
    try:
        signal.raise_signal({})
    except KeyboardInterrupt:
        raise ImportError("initialization failed")
app._invoke = invoke
sys.argv = ["qdqbench", "run"]
app.program()
"""
BEGINNING = "qdqbench: interrupted before it began; nothing was changed\n"
RESUMES = "qdqbench: interrupted; what is finished is kept, and the same command resumes\n"
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        # the policy is set before torch is there, unless torch is timed
        pytest.param(POLICY.format("run"), 0, "PASSIVE False\n", "", id="threads sleep"),
        pytest.param(POLICY.format("bench"), 0, "None False\n", "", id="threads of a bench"),
        pytest.param(CYCLES, 0, "0\nTrue\n0\n2\n", "", id="cycles are looked for seldom"),
        # what Python does at its end is done, and nothing of libraries
        pytest.param(DESTRUCTORS.format("sys.exit(2)"), 2, "registered\n", "", id="an error"),
        pytest.param(DESTRUCTORS.format("None"), 0, "registered\n", "", id="an end"),
        pytest.param(DESTRUCTOR, 130, "", "", id="a signal in a destructor comes again"),
        *[(EARLY.format(int(each)), 128 + each, "", BEGINNING) for each in SIGNALS],
        *[(SWALLOWED.format(int(each)), 128 + each, "", RESUMES) for each in SIGNALS],
    ],
)
def test_what_a_process_says_and_how_it_ends(code, status, out, err):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = python(code, env=clean)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
@pytest.mark.parametrize("kept", [True, False])
def test_freed_memory_serves_the_next_array(kept):
    code = (
        "import resource; from qdqbench.quantize.utils.system.process import disable_malloc_trim; "
        f"{kept} and disable_malloc_trim(); "
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt; "
        "once = bytearray(2**26); del once; before = faults(); "
        "[len(bytearray(2**26)) for _ in range(4)]; print(faults() - before)"
    )
    faults, pages = int(python(code).stdout), 4 * 2**26 // resource.getpagesize()
    assert faults < pages / 8 if kept else faults > pages / 2


def test_a_command_whose_last_words_nobody_reads_ends_as_it_would():
    code = "from qdqbench.cli import app; app.main = lambda: print('word'); app.program()"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    done = python(code, env=buffered, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_works_with_closed_streams(tmp_path):
    code = (
        "import os, sys; from qdqbench.cli import app; app.main = lambda: print('word') or "
        f"open({str(tmp_path / 'file')!r}, 'w').write('text'); app.program()"
    )
    closed = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-']
    done = subprocess.run([*closed, sys.executable, code], check=False, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "text"


def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_cpu_time_is_of_all_threads_and_waiting_costs_none():
    with measure_cost() as worked:
        thread = threading.Thread(target=busy, args=(0.1,))
        thread.start()
        busy(0.1)
        thread.join()
    with measure_cost() as waited:
        time.sleep(0.1)
    assert worked.cpu_s >= 0.18  # the clock of `os.times` has steps of 10 ms
    assert worked.wall_s >= 0.1
    assert waited.wall_s >= 0.1
    assert waited.cpu_s <= 0.06
    assert worked.peak_rss_bytes > 0


WAITS = """
import signal, time
from qdqbench.cli import app
from qdqbench.quantize.tasks.data.files import cache_folder
def main():
    try:
        print(cache_folder(), flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        raise app._Interrupted(app.process.interruption.status) from None
app.main = main
signal.signal(signal.SIGINT, signal.default_int_handler)
app.program()
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_removes_copies_of_data_and_is_the_status(number):
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        copies = Path(process.stdout.readline().strip())
        assert copies.is_dir()
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert not copies.exists()
