"""A worker whose engine gives the number that a text says; times in s are part of its order."""

import sys
import time

import numpy as np

from qdqbench.quantize.core.errors import MissingDevice
from qdqbench.quantize.serve import worker

CRASH, HANG, FAIL, BROKEN = "crash", "hang", "fail", "nan"  # texts that do this to the engine
SPECIAL = {CRASH: 10, HANG: 11, FAIL: 12, BROKEN: 13}


def value(row) -> float:
    """What the fake engine answers for the tokens of a text: exact in FP32."""
    digits = [int(token) for token in row if token < 10]
    return float("nan") if SPECIAL[BROKEN] in row else float(int("".join(map(str, digits)) or 0) % 10**7)


def opened(order):
    """A worker's engine."""
    if order.get("refuses"):
        raise MissingDevice("there is no such device")

    time.sleep(order.get("loads", 0.0))

    def run(batch):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if (ids == SPECIAL[CRASH]).any():
            sys.exit(1)
        if (ids == SPECIAL[HANG]).any():
            time.sleep(1000)
        if (ids == SPECIAL[FAIL]).any():
            raise RuntimeError("the device is lost")
        time.sleep(order["per_batch"] + order["per_row"] * len(ids))
        rows = [ids[place][mask[place] == 1] for place in range(len(ids))]
        others = [0.0] * (order.get("classes", 1) - 1)
        return np.array([[value(row), *others] for row in rows], dtype=np.float32)

    return run


if __name__ == "__main__":
    worker.main(opened)
