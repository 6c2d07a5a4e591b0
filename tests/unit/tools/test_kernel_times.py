"""The table of kernel times: each kernel once, with the median of its launches."""

from types import SimpleNamespace

import numpy as np
from tools.kernel_times import random_tokens, table, time_alone


class Engine:
    """Two operations, whose kernels take longer in each run."""

    arrays = {"embed.word": np.zeros((50, 8))}
    runs = 0

    def __init__(self, padding):
        self.plan = SimpleNamespace(embed=SimpleNamespace(padding=padding))

    def profile(self, _):
        self.runs += 1
        return [{"gemm": 0.001 * self.runs}, {"norm": 0.002}, {"gemm": 0.003}]


def test_launches_of_a_kernel_are_one_row():
    times = time_alone(Engine(None), None)
    assert {name: np.round(each, 6).tolist() for name, each in times.items()} == {"gemm": [4, 3], "norm": [2]}
    rows = table(times, 0.0085).splitlines()
    assert rows[2] == "| gemm | 2 | 3.5 | 0.007 | 78% |"
    assert rows[3] == "| norm | 1 | 2.0 | 0.002 | 22% |"
    assert rows[4] == "| all, each alone | 3 | | 0.009 | 100% |"
    assert rows[5] == "| CUDA graph, hot | 3 | | 0.009 | |"


def test_rows_have_one_length_and_positions_behind_the_padding():
    for padding, first in ((None, 0), (1, 2)):
        tokens = random_tokens(Engine(padding), rows=3, length=5)
        assert tokens.starts.tolist() == [0, 5, 10, 15]
        assert tokens.positions.tolist() == [first + at for at in range(5)] * 3
        assert 2 <= tokens.ids.min() <= tokens.ids.max() < 50
