"""A server whose engine is a sum: answers tell which text they belong to, and how long they take is known.

As a script: serves, with the fields of Settings as JSON; `order` has the arguments of `fake_served`, or, with
`endpoint`, of `tiny_served`.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from qdqbench.quantize.deployment.opened import _read_pages
from qdqbench.quantize.standalone.runtimes import Done, Streams
from qdqbench.quantize.standalone.server.settings import Served, Settings
from qdqbench.quantize.utils.errors import MissingDevice

SPECIAL = {"crash": 10, "hang": 11, "fail": 12, "nan": 13}  # words that do this to the engine
PAD, START, END, UNKNOWN = 14, 15, 16, 17
INPUTS = ["input_ids", "attention_mask", "token_type_ids"]


def digits() -> str:
    """A tokenizer: a digit is a token."""
    marks = {"[PAD]": PAD, "[CLS]": START, "[SEP]": END, "[UNK]": UNKNOWN}
    words = {str(digit): digit for digit in range(10)}
    made = Tokenizer(models.WordLevel(words | SPECIAL | marks, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    ends = [("[CLS]", START), ("[SEP]", END)]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    return made.to_str()


def value(row) -> float:
    """Return what the fake engine answers for the tokens of a text: exact in FP32."""
    found = [int(token) for token in row if token < 10]
    return float("nan") if SPECIAL["nan"] in row else float(int("".join(map(str, found)) or 0) % 10**7)


@dataclass(frozen=True)
class Engine:
    """An engine of known times, in s."""

    per_batch: float = 0.0
    per_row: float = 0.0
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


class Idle(Engine):
    """One that computes nothing, as an engine without padding does."""

    def launch(self, ids, types, lengths):
        return Done(np.zeros((len(lengths), self.width), np.float32))


class Packing(Engine):
    """The sum, of rows without padding; a batch is done after a while."""

    def launch(self, ids, types, lengths):
        rows = np.split(ids, np.cumsum(lengths)[:-1])
        engine = super().__call__
        del types

        class Launched:
            asked = 0

            def query(self):
                self.asked += 1
                return self.asked > 3

            def read(self):
                width = max(map(len, rows))
                batch = np.full((len(rows), width), PAD)
                for place, row in enumerate(rows):
                    batch[place, : len(row)] = row
                mask = np.arange(width) < np.array(lengths)[:, None]
                return engine({"input_ids": batch, "attention_mask": mask.astype(int)})

        return Launched()


def in_streams(**fields):
    """One of two streams, for batches at once."""
    return Streams(lambda _: Engine(**fields), 2)


def open_fake(kind, loads, refuses, **fields):
    """An engine, in its process."""
    time.sleep(loads)
    if refuses:
        raise MissingDevice("there is no such device")
    return kind(**fields)


def fake_told(**more):
    """What model.json would have."""
    told = {"kind": "regression", "texts": ["a text"], "words": False, "over_tokens": False, "max_length": 64}
    told |= {"truncation": "longest_first", "stride": 0, "side": "right", "labels": [], "prompt": ""}
    return told | {"pad_id": PAD, "batch": 8, "inputs": INPUTS} | more


def make_served(told, tokenizer, engine, fp32=False, texts=tuple) -> Served:
    """A run of an engine that is made by a function."""
    fp32_too = {"fp32": engine} if fp32 else {}
    return Served("fake", "fake", "fake 1", told, tokenizer, {"engine": engine} | fp32_too, texts=texts)


def fake_served(
    *,
    max_length=64,
    classes=(),
    batch=8,
    fp32=False,
    loads=0.0,
    refuses=False,
    kind="Engine",
    pages=False,
    **engine,
):
    """A run that scores a text of up to seven digits by its number.

    With classes the number is the logit of the first, and the others have 0.
    """
    about = {"kind": "classification", "labels": [*classes]} if classes else {}
    told = fake_told(max_length=max_length, batch=batch, **about)
    fields = engine | {"width": max(len(classes), 1)}
    made = make_served(told, digits(), partial(open_fake, globals()[kind], loads, refuses, **fields), fp32)
    return replace(made, pages=dict(_read_pages())) if pages else made


def _lines(path):
    return Path(path).read_text(encoding="utf-8").splitlines()[:1000] if path else ()


def noop_served(tokenizer, texts):
    """A run of a real tokenizer, whose engine computes nothing."""
    told = fake_told(kind="classification", labels=["bad", "good"], max_length=128, pad_id=0, batch=256)
    opener = partial(open_fake, Idle, 0.0, False, width=2)
    tokenizer = Path(tokenizer).read_text(encoding="utf-8")
    return make_served(told, tokenizer, opener, texts=partial(_lines, texts))


def tiny_served(endpoint, kind="Mixing", **engine):
    """A run of an endpoint of `TASKS`, with a real tokenizer."""
    from ..integration.tiny import tokenizer
    from .requests import TASKS

    told, width = TASKS[endpoint]
    opener = partial(open_fake, globals()[kind], 0.0, False, width=width, **engine)
    own = tokenizer()
    told = fake_told(**told, pad_id=own.pad_token_id)
    return make_served(told, own.backend_tokenizer.to_str(), opener)


def main():
    """As the docstring of this file says."""
    from qdqbench.quantize.standalone.server.server import Failed, serve

    asked = json.loads(sys.argv[1])
    order = asked.pop("order", {})
    kinds = {"endpoint": tiny_served, "tokenizer": noop_served}
    served = next((make for key, make in kinds.items() if key in order), fake_served)(**order)
    try:
        serve(served, Settings(**asked), lambda url, loopback: print(url, flush=True))
    except Failed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
