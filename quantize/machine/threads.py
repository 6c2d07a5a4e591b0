"""How the threads of numeric libraries wait for each other, and how many there are.

An OpenMP thread that is done spins until the others are, which is quick where every core is free. Beside
another busy process one of them has no core, and the others spin away the time that it needs: several times
the CPU time for the same work, when it is scarce. Threads that sleep cost a wake-up of some microseconds.
"""

import os
from collections.abc import MutableMapping

from qdqbench.quantize.machine.cpu import quota


def share_cores(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP threads of this process and its children sleep while they wait; what is set already stays.

    They are as many as the library chooses, one a core, but no more than a container may use at once. Call it
    before torch is imported: libraries read these variables once. Not for what measures how fast PyTorch is.
    """
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (most := quota()) is not None:
        environ.setdefault("OMP_NUM_THREADS", str(most))
