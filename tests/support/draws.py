"""Two programs that sum in different orders: now and then a code next to a rounding border differs.

Of 288 draws for six tiny models 9 had such a code; a fault is in all draws.
"""

import numpy as np

DRAWS, FLIPPED = 3, 0.3  # of the largest answer, where a code differs


def require_alike(compute, tolerance):
    """Compare answers with what is expected, for `DRAWS` seeds; errors are of the largest answer."""
    pairs = [compute(seed) for seed in range(DRAWS)]
    errors = np.array([np.abs(got - expected).max() / np.abs(expected).max() for got, expected in pairs])
    assert errors.min() <= tolerance, errors
    assert errors.max() <= FLIPPED, errors  # NaN fails both
