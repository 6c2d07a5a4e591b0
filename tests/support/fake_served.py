"""A server whose engine is a sum: answers tell which text they belong to, and how long they take is known.

As a script: serves, with the fields of Settings as JSON.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.serve.endpoints import ENDPOINTS
from qdqbench.quantize.serve.served import Limits, Served
from qdqbench.quantize.tasks.task import Task

COMMAND = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
SPECIAL = {"crash": 10, "hang": 11, "fail": 12, "nan": 13}  # words that fake_worker.py knows
PAD, START, END = 14, 15, 16


class Tokenizer:
    """A digit is a token; what it does not know is dropped."""

    is_fast, pad_token_id = True, PAD

    def num_special_tokens_to_add(self, pair):
        return 2

    def __call__(self, texts, *, max_length, **options):
        rows = []
        for text in texts:
            words = [SPECIAL[word] for word in text.split() if word in SPECIAL]
            rows.append([START, *words, *(int(c) for c in text if c in "0123456789"), END])
        cut = [row[: max_length - 1] + row[-1:] if len(row) > max_length else row for row in rows]
        found = {"input_ids": cut, "token_type_ids": [[0] * len(row) for row in cut]}
        made = [SimpleNamespace(overflowing=row != short) for row, short in zip(rows, cut, strict=True)]
        return _Coded(found, made)


class _Coded(dict):
    def __init__(self, found, encodings):
        super().__init__(found)
        self.encodings = encodings


def fake_served(per_batch=0.0, per_row=0.0, max_length=64, classes=(), **order) -> Served:
    """A run that scores a text of up to seven digits by its number; times in s.

    With classes the number is the logit of the first, and the others have 0.
    """
    base = {"per_batch": per_batch, "per_row": per_row, "classes": len(classes), **order}
    return Served(
        name="fake",
        task=Task(name="numbers", text_columns=("text",), num_labels=1, metrics=("pearson",)),
        endpoint=ENDPOINTS["classification" if classes else "regression", 1],
        classes=tuple(classes),
        tokenizer=Tokenizer(),
        max_length=max_length,
        engine=base,
        twin=base,
        profiles=(Profile((1, 16), (8, 32), (64, max_length)),),
        made_with="fake 1",
        recipe="fake",
    )


def main():
    """As the docstring of this file says."""
    from qdqbench.quantize.serve.server import Settings, serve

    asked = json.loads(sys.argv[1])
    order, limits = asked.pop("order", {}), Limits(**asked.pop("limits", {}))
    serve(fake_served(**order), Settings(**asked, limits=limits), lambda url: print(url, flush=True), COMMAND)


if __name__ == "__main__":
    main()
