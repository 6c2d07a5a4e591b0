"""Embeddings of a stage against those of FP32, whatever labels say."""

import numpy as np

from qdqbench.quantize.core.arrays import Floats
from qdqbench.quantize.core.comparison import COSINE_EDGES, Agreement
from qdqbench.quantize.kinds.neighbors import NEIGHBORS
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import EMBED


def agreement_of(reference: Floats, answers: Floats, *, seed: int) -> Agreement:
    """Cosine and neighbours of embeddings, [texts, width] of FP32 and of a stage, with their standard errors.

    The errors are those of a bootstrap over texts, whose neighbours stay as they are.

    Raises:
        CheckFailed: NaN or infinite embeddings.
    """
    table = metrics.predictions(EMBED, answers, reference)
    drawn = metrics.bootstrap(EMBED, reference, [table], seed=seed, resamples=metrics.RESAMPLES)
    distances, kept = 1 - table[:, 0], np.rint(table[:, 1] * NEIGHBORS).astype(np.int64)
    return Agreement(
        n=len(table),
        values={name: EMBED.kind.metrics[name].value(table) for name in EMBED.metrics},
        stderr={name: float(np.std(values[0], ddof=1)) for name, values in drawn.items()},
        cosine_counts=np.bincount(
            np.searchsorted(COSINE_EDGES, distances), minlength=len(COSINE_EDGES) + 1
        ).tolist(),
        neighbor_counts=np.bincount(kept, minlength=NEIGHBORS + 1).tolist(),
    )
