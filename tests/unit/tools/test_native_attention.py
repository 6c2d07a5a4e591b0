"""Candidates for attention over long rows, on the emulator: they make the codes of the shipped kernels."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.quantize.engine.cuda.runtime import find_reach

from ...support.emulate import COMPILER, Emulator, compile_text
from ...tools.native_attention.bench import CASES, SIZES, Inputs, list_contestants, read_text

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def emulator(made_once):
    return Emulator(made_once("candidates", lambda folder: compile_text(read_text(), folder / "attention")))


@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    size=st.sampled_from(SIZES),
    together=st.integers(1, 4),
)
@settings(max_examples=3)
def test_teams_make_the_codes_of_the_shipped_kernel(emulator, lengths, size, together):
    hold(emulator, lengths, size, together, heads=4)


@pytest.mark.long
@pytest.mark.parametrize("lengths", [[384], [300, 400]])  # of one window each, or beyond what a block holds
def test_teams_take_long_rows(emulator, lengths):
    hold(emulator, lengths, 64, heads=1)


def hold(emulator, lengths, size, together=1, heads=2):
    """Hold all kernels, with so many heads a block, to the shipped one with a head a block."""
    inputs = Inputs(lengths, heads, size)
    shipped, *teams = list_contestants(size, find_reach(inputs.starts))
    made = []
    for each, of_block in [(shipped, 1), *((each, together) for each in (shipped, *teams))]:
        out = np.full((len(inputs.codes), heads * size), 99, np.int8)
        if inputs.launch(emulator, each, of_block, out, lambda array: array.ctypes.data):
            made.append((each.name, out[: sum(lengths)]))
    (_, wanted), *others = made
    assert len(others) >= 3
    for name, out in others:
        off = np.abs(out.astype(int) - wanted)
        assert off.max() <= (0 if name == shipped.name else 2), name
        assert (off > 0).sum() <= max(size, 0.002 * off.size), name


def test_every_case_has_a_kernel(emulator):
    for (_, heads, size), windows in itertools.product(CASES.values(), (1, 4)):
        assert size in SIZES
        assert heads % windows == 0
