"""A model that answers texts: what the scripts of a deployed folder share."""

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .answers import ANSWERS, Answer, Rows
from .runtimes import Infer, Launched, launch, open_runtime, read
from .texts import Coded, Refused, make_encoder

PACKED_TOKENS = 16_384  # of a batch, for an engine that needs no padding


class Model:
    """Answers samples: texts, pairs of texts, or lists of words, as `told` of model.json says.

    Args:
        infer: answers [rows, width], or [rows, length, width], of tokens, int64 [rows, length] by name.
        batch: most rows of a batch that is padded; None: as `told`.
        fast: a tokenizer for texts of printable ASCII.
    """

    def __init__(
        self,
        told: Mapping[str, Any],
        tokenizer: Any,
        infer: Infer,
        batch: int | None = None,
        fast: Any = None,
    ) -> None:
        self.told, self.infer, self.batch = told, infer, batch or told["batch"]
        self.encoder = make_encoder(told, tokenizer, fast)

    def predict(self, samples: Sequence[Any], prompt: str | None = None) -> list[Answer]:
        """Return an answer for each sample.

        Args:
            prompt: before each text of a model of embeddings; None: as the run was evaluated.

        Raises:
            Refused: a context would be read in too many windows, or an answer is no number.
        """
        if not samples:
            return []
        if self.encoder.stride:
            self.encoder.require_few_windows(samples)
        if prompt := self.told["prompt"] if prompt is None else prompt:
            samples = [f"{prompt}{text}" for text in samples]
        coded = self.encoder.code(samples)
        rows = Rows(coded.numbers, coded.rows, self.run(coded))
        return ANSWERS[self.told["kind"]](samples, rows, self.told["labels"])

    def run(self, coded: Coded) -> list[npt.NDArray[Any]]:
        """Return the answers of each row, run in batches of rows of like length."""
        order = np.argsort(-coded.lengths, kind="stable")
        lengths, under_way = coded.lengths[order], deque[tuple[Any, Launched]]()
        sorted_answers = list[npt.NDArray[Any]]()

        def take(most: int) -> None:
            while len(under_way) > most:
                part, launched = under_way.popleft()
                found = launched.read()
                if not np.isfinite(found).all():
                    raise Refused("the model answers NaN or infinity here; take another runtime")
                ends = part.cumsum()[:-1]
                sorted_answers.extend(np.split(found, ends) if self.told["over_tokens"] else found)

        bounds = self.split(lengths)
        for first, last in pairwise(bounds):
            part = coded.pick(order[first:last])
            given = self.infer, self.told, part.ids, part.types, part.lengths
            launched = launch(*given, alone=len(bounds) == 2)
            under_way.append((part.lengths, launched))
            take(getattr(self.infer, "streams", 1))  # the host prepares one while the device computes another
        take(0)
        made: list[Any] = [None] * len(order)
        for place, answers in zip(order.tolist(), sorted_answers, strict=True):
            made[place] = answers
        return made

    def split(self, lengths: npt.NDArray[Any]) -> list[int]:
        """Return where batches begin, and the end: by tokens where rows are not padded."""
        if not getattr(self.infer, "launch", None):
            return [*range(0, len(lengths), self.batch), len(lengths)]
        ends, bounds = lengths.cumsum(), [0]
        while (start := bounds[-1]) < len(lengths):
            most = ends[start] - lengths[start] + PACKED_TOKENS
            bounds.append(max(start + 1, int(np.searchsorted(ends, most, "right"))))
        return bounds

    def main(self) -> None:
        """Answer the texts of the command line, or else the lines of standard input; a line of JSON each."""
        if self.told["failed"]:
            print(f"warning: not for use, {self.told['failed']}", file=sys.stderr)
        lines = sys.argv[1:] or [line.rstrip("\n") for line in sys.stdin]
        samples: list[Any] = [line.split() for line in lines] if self.told["words"] else lines
        if len(self.told["texts"]) == 2:
            given = sys.argv[1:] or [text for line in lines for text in line.split("\t")]
            if len(given) % 2:
                raise SystemExit(f"give {' and '.join(self.told['texts'])}, in a line with a tab between")
            samples = [*zip(given[::2], given[1::2], strict=True)]
        try:
            answers = self.predict(samples)
        except Refused as error:
            raise SystemExit(str(error)) from error
        for answer in answers:
            print(json.dumps(answer, ensure_ascii=False, default=np.ndarray.tolist))


def open_folder(folder: Path, runtime: str) -> Model:
    """Open the model of a deployed folder; SystemExit with a sentence where it cannot run here."""
    told = json.loads(read(folder, "model.json"))
    tokenizer = Tokenizer.from_str(read(folder, "tokenizer.json").decode())
    return Model(told, tokenizer, open_runtime(runtime, folder, told))
