"""How the share that is in INT8 is put into words, by every command and report."""

from qdqbench.quantize.utils.names import count_of


def share(done: int, of: int) -> str:
    """Return a share under a heading that says of what: `35 of 36`."""
    return f"{done} of {of}"


def coverage(done: int, of: int, what: str) -> str:
    """Return how much runs in INT8: `36 of 38 linears in INT8`."""
    return f"{share(done, of)} {what} in INT8"


def fused_attentions(done: int, of: int) -> str:
    """Return how many attentions are INT8 kernels: `3 of 4 attentions run as one INT8 kernel`."""
    return f"{share(done, of)} attentions run as one INT8 kernel"


def uncovered(lost: int) -> str:
    """Return how much of what should run in INT8 does not: `1 GEMM that should be in INT8 is not`."""
    return f"{count_of(lost, 'GEMM')} that should be in INT8 {'is' if lost == 1 else 'are'} not"
