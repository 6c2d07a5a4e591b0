"""The command line as `python -m qdqbench`, `accelerate launch -m qdqbench` and `torchrun -m qdqbench`."""

import importlib

from qdqbench.quantize.utils.system.early import watch_early


def start() -> None:
    """Run the installed command; Ctrl-C holds before its imports, which take a second."""
    watch_early()
    importlib.import_module("qdqbench.cli.app").program()


if __name__ == "__main__":
    start()
