"""Graphs that backend cuda takes, by the cases of `write_once`, and what is packed of them."""

import numpy as np
import onnx
import pytest

from qdqbench.quantize.engine.cuda import check
from qdqbench.quantize.engine.cuda.compile import load_nvrtc
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.utils.errors import MissingDevice

from ....support.cuda_graphs import write_once


@pytest.fixture(scope="session")
def path_of(made_once):
    return lambda *case: write_once(made_once, *case)


@pytest.fixture(scope="session")
def graph_of(path_of):
    return lambda *case: onnx.load(path_of(*case))


@pytest.fixture(scope="session")
def packed(graph_of):
    """A plan and its arrays, to be changed at will."""
    return lambda *case: pack(match_graph(graph_of(*case)))


@pytest.fixture
def nvrtc():
    try:
        return load_nvrtc()
    except MissingDevice as error:
        pytest.skip(str(error))


@pytest.fixture
def in_fp32(monkeypatch):
    """FP16 would move codes next to rounding borders."""
    monkeypatch.setattr(check, "HALF", np.dtype(np.float32))
