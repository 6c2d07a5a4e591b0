"""What a model needs of Triton here: the Python backend's API."""

import importlib.util
import json
import re
import sys
import types

import numpy as np


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class TritonError(Exception):
    pass


class InferenceRequest:
    def __init__(self, inputs):
        self.inputs = inputs


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self._tensors, self._error = output_tensors, error

    def output_tensors(self):
        return self._tensors

    def error(self):
        return self._error


def get_input_tensor_by_name(request, name):
    return next((tensor for tensor in request.inputs if tensor.name() == name), None)


def column(texts):
    return np.array([[text.encode()] for text in texts], dtype=np.object_)


class Loaded:
    """The model of a repository, in this process."""

    def __init__(self, folder):
        text = (folder / "config.pbtxt").read_text()
        inputs, outputs = (
            re.findall(r'name: "(\w+)" data_type', part) for part in text.split("output [")[:2]
        )
        config = {
            "input": [{"name": name} for name in inputs],
            "output": [{"name": name} for name in outputs],
        }
        runtime = re.search(r'key: "runtime" value: { string_value: "(\w+)"', text)[1]
        config |= {"parameters": {"runtime": {"string_value": runtime}}}
        made = types.ModuleType("triton_python_backend_utils")
        for each in (Tensor, TritonError, InferenceRequest, InferenceResponse, get_input_tensor_by_name):
            setattr(made, each.__name__, each)
        before, sys.modules[made.__name__] = [*sys.path], made
        try:
            spec = importlib.util.spec_from_file_location("model", folder / "1" / "model.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            self.model = module.TritonPythonModel()
            where = {"model_repository": str(folder), "model_version": "1"}
            self.model.initialize({**where, "model_config": json.dumps(config)})
        finally:
            sys.path[:] = before
            for name in [name for name in sys.modules if name.partition(".")[0] == "standalone"]:
                del sys.modules[name]  # the next repository has its own

    def ask(self, *requests):
        """Responses to requests of texts by input."""
        return self.model.execute(
            [InferenceRequest([Tensor(name, array) for name, array in each.items()]) for each in requests]
        )

    def answers(self, *requests):
        """Answers to texts by input, of requests that come at once: what JSON tells, or arrays."""
        columns = ({name: column(texts) for name, texts in each.items()} for each in requests)
        for response in self.ask(*columns):
            assert response.error() is None, response.error()
            array = response.output_tensors()[0].as_numpy()
            yield from array if array.dtype == np.float32 else (json.loads(row[0]) for row in array)
