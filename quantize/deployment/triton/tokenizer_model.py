"""The tokenizer of a run as a model of Triton's Python backend: texts in, padded tokens out.

Copied as it is into a model repository (`1/model.py`), where it has `tokenizers` and numpy alone. The texts
of a request are padded to one of a few lengths, so that requests of like length can share a batch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb
from tokenizers import Tokenizer

OUTSIDE = -1  # in SPANS and WORDS: a token that stands for nothing there
MOST_CHARACTERS = 200_000  # of a text


class TritonPythonModel:
    """Python model that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the tokenizer next to this file, and the parameters of config.pbtxt."""
        config = json.loads(args["model_config"])
        told = {name: each.get("string_value", "") for name, each in config["parameters"].items()}
        self.lengths = [int(length) for length in told["lengths"].split(",")]
        self.pad_id, self.words, self.prompt = int(told["pad_id"]), told["words"] == "true", told["prompt"]
        self.inputs = [each["name"] for each in config["input"]]
        self.outputs = [each["name"] for each in config["output"]]
        file = str(Path(args["model_repository"]) / args["model_version"] / "tokenizer.json")
        self.tokenizer, self.whole = Tokenizer.from_file(file), Tokenizer.from_file(file)
        self.tokenizer.no_padding()
        self.whole.no_padding()
        self.whole.no_truncation()
        self.tokenizer.enable_truncation(self.lengths[-1], strategy=told["truncation"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """An answer for each request; one that cannot be read has an error of its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            columns = [self._texts(request, name) for name in self.inputs]
            pairs = zip(*columns, strict=True)
            rows: list[Any] = [*map(self._shorten, pairs)] if len(columns) > 1 else columns[0]
            if self.words:
                rows = [text.split() for text in rows]
            coded = self.tokenizer.encode_batch(rows, is_pretokenized=self.words)
        except Exception as error:  # `tokenizers` raises bare ones; one text must not fail a whole batch
            return pb.InferenceResponse(error=pb.TritonError(f"the texts cannot be read: {error}"))
        longest = max(len(each.ids) for each in coded)
        length = next(length for length in self.lengths if length >= longest)
        made = {name: self._array(name, coded, length) for name in self.outputs}
        return pb.InferenceResponse(output_tensors=[pb.Tensor(name, each) for name, each in made.items()])

    def _texts(self, request: Any, name: str) -> list[str]:
        found = pb.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
        texts = [each.decode("utf-8") if isinstance(each, bytes) else str(each) for each in found]
        if any(len(text) > MOST_CHARACTERS for text in texts):
            raise ValueError(f"a text has more than {MOST_CHARACTERS} characters")
        return [f"{self.prompt}{text}" for text in texts]

    def _shorten(self, pair: tuple[str, ...]) -> tuple[str, ...]:
        """Cut a pair behind what truncation can keep: `tokenizers` combines all parts that it cuts off."""
        most = self.lengths[-1]
        if max(map(len, pair)) <= 8 * most:
            return pair
        coded = self.whole.encode_batch([*pair], add_special_tokens=False)
        longest = max(len(each.ids) for each in coded)
        kept = [2 * most + (len(each.ids) == longest) for each in coded]
        found = zip(pair, coded, kept, strict=True)
        return tuple(
            text[: each.offsets[keep - 1][1]] if len(each.ids) > keep else text for text, each, keep in found
        )

    def _array(self, name: str, coded: list[Any], length: int) -> npt.NDArray[np.int64]:
        fill = {"input_ids": self.pad_id, "SPANS": OUTSIDE, "WORDS": OUTSIDE}.get(name, 0)
        shape = (len(coded), length, 2) if name == "SPANS" else (len(coded), length)
        made = np.full(shape, fill, dtype=np.int64)
        for row, each in enumerate(coded):
            made[row, : len(each.ids)] = _values(name, each)
        return made


def _values(name: str, coded: Any) -> Any:
    """One value for each token of a text, or for SPANS two."""
    if name == "SPANS":  # where in the second text a token stands
        inside = [sequence == 1 for sequence in coded.sequence_ids]
        return [
            span if kept else (OUTSIDE, OUTSIDE) for span, kept in zip(coded.offsets, inside, strict=True)
        ]
    if name == "WORDS":  # the word that a token is the first of
        seen, found = set(), []
        for word in coded.word_ids:
            found.append(OUTSIDE if word is None or word in seen else word)
            seen.add(word)
        return found
    taken = {"input_ids": coded.ids, "attention_mask": coded.attention_mask, "token_type_ids": coded.type_ids}
    return taken[name]
