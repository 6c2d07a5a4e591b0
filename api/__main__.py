"""The command line as `python -m qdqbench`, `accelerate launch -m qdqbench` and `torchrun -m qdqbench`."""

from qdqbench.quantize.cli.app import program

if __name__ == "__main__":
    program()
