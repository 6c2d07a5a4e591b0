"""Rows of engines that were never measured: latencies of known coefficients, for tests of the cost model."""

import numpy as np

from qdqbench.eval.placement.cost_model import COST_COLUMNS, TERMS, CostRow, ModelShape, Placement, terms

TINY = ModelShape(layers=2, hidden=64, intermediate=128, heads=4)
SMALL = ModelShape(layers=6, hidden=384, intermediate=1536, heads=12)
# milliseconds of one unit of each term; invented, of the order of a large GPU
COEFFICIENTS = {
    "base": 0.02,
    "kernels": 0.0015,
    "int8_kernels": 0.0005,
    "fp16_gemm": 4e-6,
    "int8_gemm": 2e-6,
    "traffic": 4e-10,
    "gelu": 3e-10,
    "attention_fp16": 1e-11,
    "attention_int8": 6e-12,
    "borders": 2e-10,
    "heads": 1e-10,
    "unmerged": 2e-10,
    "embeddings": 1e-8,
}


def predicted(model, placement, batch, length):
    return float(terms(model, placement, batch, length) @ np.array([COEFFICIENTS[name] for name in TERMS]))


def made_rows(models=(TINY, SMALL), engines=12, noise=0.0, seed=0, **changes):
    """Rows of random placements at a few shapes."""
    random, rows = np.random.default_rng(seed), []
    for model in models:
        for number in range(engines):
            placement = {
                name: "".join("01"[value] for value in random.integers(0, 2, model.layers))
                for name in COST_COLUMNS
            }
            if number == 0:
                placement = dict.fromkeys(COST_COLUMNS, "1" * model.layers)
            for batch, length in ((1, 32), (8, 128), (32, 128), (128, 128)):

                def time_of(each, model=model, batch=batch, length=length):
                    return predicted(model, each, batch, length) * (1 + noise * random.standard_normal())

                rows.append(
                    CostRow(
                        name=f"h{model.hidden}",
                        model=model,
                        batch=batch,
                        length=length,
                        placement=placement,
                        ms_int8=time_of(Placement.parse(placement)),
                        ms_fp16=time_of(Placement.none(model.layers)),
                        **{"gpu": "made-up GPU", "backend": "tensorrt_rtx", "version": "0.0", **changes},
                    )
                )
    return rows
