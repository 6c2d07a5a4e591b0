"""A model that answers texts: what the scripts of a deployed folder share."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .answers import ANSWERS, Answer, Row
from .runtimes import Infer, open_runtime, read
from .texts import Encoder, Refused, pad_rows


class Model:
    """Answers samples: texts, pairs of texts, or lists of words, as `told` of model.json says.

    Args:
        infer: answers [rows, width], or [rows, length, width], of tokens, int64 [rows, length] by name.
        batch: most rows of a batch; None: as `told`.
    """

    def __init__(
        self, told: Mapping[str, Any], tokenizer: Any, infer: Infer, batch: int | None = None
    ) -> None:
        self.told, self.infer, self.batch = told, infer, batch or told["batch"]
        options = {name: told[name] for name in ("words", "stride", "truncation", "side")}
        self.encoder = Encoder(tokenizer, told["max_length"], **options)

    def predict(self, samples: Sequence[Any], prompt: str | None = None) -> list[Answer]:
        """Return an answer for each sample.

        Args:
            prompt: before each text of a model of embeddings; None: as the run was evaluated.

        Raises:
            Refused: a context would be read in too many windows, or an answer is no number.
        """
        if self.encoder.stride:
            self.encoder.require_few_windows(samples)
        if prompt := self.told["prompt"] if prompt is None else prompt:
            samples = [f"{prompt}{text}" for text in samples]
        coded = [*self.encoder.encode(samples)]
        made = self._run([row for _, row in coded])
        rows: list[list[Row]] = [[] for _ in samples]
        for (number, row), answers in zip(coded, made, strict=True):
            rows[number].append(Row(row, answers))
        return ANSWERS[self.told["kind"]](samples, rows, self.told["labels"]) if samples else []

    def _run(self, rows: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Return the answers of each row, run in batches of rows of like length."""
        ids = [np.array(row.ids, dtype=np.int64) for row in rows]
        order = sorted(range(len(rows)), key=lambda row: -len(ids[row]))
        made: list[Any] = [None] * len(rows)
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            types = [rows[row].type_ids for row in part]
            batch = pad_rows([ids[row] for row in part], types, self.told["pad_id"])
            found: Any = self.infer({name: batch[name] for name in self.told["inputs"]})
            if self.told["over_tokens"]:
                found = [answers[: len(ids[row])] for row, answers in zip(part, found, strict=True)]
            if not all(np.isfinite(each).all() for each in (found if self.told["over_tokens"] else [found])):
                raise Refused("the model answers NaN or infinity here; take another runtime")
            for row, answers in zip(part, found, strict=True):
                made[row] = answers
        return made

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
