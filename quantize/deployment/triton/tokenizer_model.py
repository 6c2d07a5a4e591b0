"""The tokenizer of a run as a model of Triton's Python backend: texts in, padded tokens out.

Copied as it is into a model repository (`1/model.py`), as `standalone` is; both need `tokenizers` and NumPy
alone. The texts of a request are padded to one of a few lengths, so that requests of like length can share a
batch.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb
from tokenizers import Tokenizer

COLUMNS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
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
        folder = Path(args["model_repository"]) / args["model_version"]
        sys.path.append(str(folder))  # where `standalone` lies
        self.answers, texts = (import_module(f"standalone.{name}") for name in ("answers", "texts"))
        self.encoder = texts.Encoder(
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            self.lengths[-1],
            words=self.words,
            truncation=told["truncation"],
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """An answer for each request; one that cannot be read has an error of its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            columns = [self._texts(request, name) for name in self.inputs]
            samples: list[Any] = [*zip(*columns, strict=True)] if len(columns) > 1 else columns[0]
            if self.words:
                samples = [text.split() for text in samples]
            coded = [row for _, row in self.encoder.encode(samples)]
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

    def _array(self, name: str, coded: list[Any], length: int) -> npt.NDArray[np.int64]:
        fill = {"input_ids": self.pad_id, "SPANS": OUTSIDE, "WORDS": OUTSIDE}.get(name, 0)
        shape = (len(coded), length, 2) if name == "SPANS" else (len(coded), length)
        made = np.full(shape, fill, dtype=np.int64)
        for row, each in enumerate(coded):
            if name == "SPANS":  # where in the second text a token stands
                made[row, : len(each.ids)] = self.answers.find_spans(each)
            elif name == "WORDS":  # the word that a token is the first of
                positions, words = self.answers.find_first_tokens(each)
                made[row, positions] = words
            else:
                made[row, : len(each.ids)] = getattr(each, COLUMNS[name])
        return made
