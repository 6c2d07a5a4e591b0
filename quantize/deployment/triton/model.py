"""A run as a model of Triton's Python backend: texts to answers, by the modules and the runtime of `deploy/`.

Copied as it is into a model repository (`1/model.py`), next to what it reads.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

MOST_CHARACTERS = 200_000  # of a text


class TritonPythonModel:
    """Python model that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model next to this file with the runtime that config.pbtxt names."""
        config = json.loads(args["model_config"])
        self.inputs, self.output = [each["name"] for each in config["input"]], config["output"][0]["name"]
        folder = Path(args["model_repository"]) / args["model_version"]
        sys.path.append(str(folder))
        self.model: Any = import_module("standalone.model").open_folder(
            folder, config["parameters"]["runtime"]["string_value"]
        )
        self.model.predict(
            [("a", "a") if len(self.inputs) == 2 else ["a"] if self.model.told["words"] else "a"]
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer all requests at once; where that fails each alone, so that one has an error of its own."""
        try:
            return self._answer(requests)
        except Exception as error:
            if len(requests) > 1:
                return [answer for request in requests for answer in self.execute([request])]
            return [pb.InferenceResponse(error=pb.TritonError(f"the texts cannot be answered: {error}"))]

    def _answer(self, requests: list[Any]) -> list[Any]:
        read = [self._read(request) for request in requests]
        answers = self.model.predict([sample for samples in read for sample in samples])
        made, at = [], 0
        for samples in read:
            own, at = answers[at : at + len(samples)], at + len(samples)
            if "embedding" in self.output:
                array = np.array([each["embedding"] for each in own], np.float32)
            else:
                array = np.array(
                    [[json.dumps(each, ensure_ascii=False).encode()] for each in own], np.object_
                )
            made.append(pb.InferenceResponse(output_tensors=[pb.Tensor(self.output, array)]))
        return made

    def _read(self, request: Any) -> list[Any]:
        columns = []
        for name in self.inputs:
            found = pb.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
            columns.append([each.decode("utf-8") if isinstance(each, bytes) else str(each) for each in found])
            if any(len(text) > MOST_CHARACTERS for text in columns[-1]):
                raise ValueError(f"a text has more than {MOST_CHARACTERS} characters")
        if len(columns) == 2:
            return [*zip(*columns, strict=True)]
        return [text.split() for text in columns[0]] if self.model.told["words"] else columns[0]
