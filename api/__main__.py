"""The command line as `python -m qdqbench`, `accelerate launch -m qdqbench` and `torchrun -m qdqbench`."""

from qdqbench.cli.app import program

if __name__ == "__main__":
    program()
