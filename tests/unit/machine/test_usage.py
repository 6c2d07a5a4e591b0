import threading
import time

from qdqbench.quantize.machine.usage import measured


def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_cpu_time_is_of_all_threads_and_waiting_costs_none():
    with measured() as worked:
        thread = threading.Thread(target=busy, args=(0.1,))
        thread.start()
        busy(0.1)
        thread.join()
    with measured() as waited:
        time.sleep(0.1)
    assert worked.cpu_s >= 0.18  # the clock of `os.times` has steps of 10 ms
    assert worked.wall_s >= 0.1
    assert waited.wall_s >= 0.1
    assert waited.cpu_s <= 0.06
    assert worked.peak_rss_bytes > 0
