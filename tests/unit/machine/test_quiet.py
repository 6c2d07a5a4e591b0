import sys
import threading
import warnings

from qdqbench.quantize.machine.quiet import unprinted


def test_of_two_threads_none_leaves_what_the_other_set():
    inside, go_on = threading.Event(), threading.Event()
    filters, stdout = [*warnings.filters], sys.stdout

    def other() -> None:
        with unprinted():
            warnings.simplefilter("ignore")
            inside.set()
            go_on.wait(20)

    first, second = threading.Thread(target=other), threading.Thread(target=other)
    first.start()
    assert inside.wait(20)
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert [*warnings.filters] == filters
    assert sys.stdout is stdout
