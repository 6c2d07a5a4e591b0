"""A server whose engine is a sum: answers tell which text they belong to, and how long they take is known.

As a script: serves, with the fields of Settings as JSON; `order` has the arguments of `fake_served`, or, with
`endpoint`, of `tiny_served`.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from qdqbench.quantize.deployment.server.served import ModelFile, Served
from qdqbench.quantize.deployment.server.settings import Settings
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.errors import MissingDevice

SPECIAL = {"crash": 10, "hang": 11, "fail": 12, "nan": 13}  # words that do this to the engine
PAD, START, END = 14, 15, 16
NO_FILE = ModelFile(Path(), "")


class Tokenizer:
    """A digit is a token; what it does not know is dropped."""

    is_fast, pad_token_id, truncation_side = True, PAD, "right"

    @property
    def backend_tokenizer(self):
        return self

    def num_special_tokens_to_add(self, pair):
        return 2

    def no_padding(self):
        pass

    def enable_truncation(self, max_length, **options):
        self.most = max_length

    def encode_batch_fast(self, texts, is_pretokenized):
        rows = []
        for text in texts:
            words = [SPECIAL[word] for word in text.split() if word in SPECIAL]
            rows.append([START, *words, *(int(c) for c in text if c in "0123456789"), END])
        cut = [row[: self.most - 1] + row[-1:] if len(row) > self.most else row for row in rows]
        return [
            SimpleNamespace(ids=short, type_ids=[0] * len(short), overflowing=row != short)
            for row, short in zip(rows, cut, strict=True)
        ]

    encode_batch = encode_batch_fast


def value(row) -> float:
    """Return what the fake engine answers for the tokens of a text: exact in FP32."""
    digits = [int(token) for token in row if token < 10]
    return float("nan") if SPECIAL["nan"] in row else float(int("".join(map(str, digits)) or 0) % 10**7)


@dataclass(frozen=True)
class Engine:
    """An engine of known times, in s."""

    per_batch: float = 0.0
    per_row: float = 0.0
    loads: float = 0.0
    refuses: bool = False
    width: int = 1  # of an answer

    def __call__(self, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if (ids == SPECIAL["crash"]).any():
            os._exit(1)
        if (ids == SPECIAL["hang"]).any():
            time.sleep(1000)
        if (ids == SPECIAL["fail"]).any():
            raise RuntimeError("the device is lost")
        time.sleep(self.per_batch + self.per_row * len(ids))
        rows = [ids[place][mask[place] == 1] for place in range(len(ids))]
        return np.array([[value(row), *[0.0] * (self.width - 1)] for row in rows], dtype=np.float32)


class Mixing(Engine):
    """One whose answers depend on every token of a row and its place; of a negative width, of each token."""

    def __call__(self, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        time.sleep(self.per_batch + self.per_row * len(ids))
        mixed = ids * mask * np.arange(1, ids.shape[1] + 1)
        mixed = mixed[..., None] if self.width < 0 else mixed.sum(1, keepdims=True)
        return (mixed * np.arange(7, 7 + abs(self.width)) % 1009 / 128).astype(np.float32)


@dataclass(frozen=True)
class FakeServed(Served):
    """A run with that engine, as both models."""

    fake: Engine = Engine()

    def open_model(self, model):
        time.sleep(self.fake.loads)
        if self.fake.refuses:
            raise MissingDevice("there is no such device")
        return self.fake


def fake_served(max_length=64, classes=(), **engine) -> FakeServed:
    """A run that scores a text of up to seven digits by its number.

    With classes the number is the logit of the first, and the others have 0.
    """
    return _served(
        Task(
            name="numbers",
            text_columns=("text",),
            num_labels=max(len(classes), 1),
            metrics=("accuracy" if classes else "pearson",),
        ),
        tuple(classes),
        Tokenizer(),
        max_length,
        Engine(**engine, width=max(len(classes), 1)),
    )


def tiny_served(endpoint, **engine) -> FakeServed:
    """A run of an endpoint of `TASKS`, with a real tokenizer."""
    from ..integration.test_serve_fuzz import TASKS
    from ..integration.tiny import tokenizer

    task, width = TASKS[endpoint]
    return _served(task, task.classes or ("bad", "good"), tokenizer(), 64, Mixing(**engine, width=width))


def _served(task, classes, tokenizer, max_length, engine):
    return FakeServed(
        name="fake",
        task=task,
        classes=classes,
        tokenizer=tokenizer,
        max_length=max_length,
        profiles=(Profile((1, 16), (8, 32), (64, max_length)),),
        made_with="fake 1",
        recipe="fake",
        engine=NO_FILE,
        graph=NO_FILE,
        fp32=NO_FILE,
        fake=engine,
    )


def main():
    """As the docstring of this file says."""
    from qdqbench.quantize.deployment.server.server import serve

    asked = json.loads(sys.argv[1])
    order = asked.pop("order", {})
    served = (tiny_served if "endpoint" in order else fake_served)(**order)
    serve(served, Settings(**asked), lambda url, loopback: print(url, flush=True))


if __name__ == "__main__":
    main()
