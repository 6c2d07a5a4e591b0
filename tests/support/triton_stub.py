"""What a repository needs of Triton here: the Python backend's API, configurations, ensembles."""

import importlib.util
import json
import sys
import types
import warnings
from pathlib import Path

import numpy as np

BINDINGS = Path(__file__).resolve().parents[2] / ".bindings" / "triton"
_DTYPES = {"TYPE_INT64": np.int64, "TYPE_FP32": np.float32, "TYPE_STRING": np.object_}


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


def backend_module():
    """A stand-in for `triton_python_backend_utils`."""
    made = types.ModuleType("triton_python_backend_utils")
    for each in (Tensor, TritonError, InferenceRequest, InferenceResponse, get_input_tensor_by_name):
        setattr(made, each.__name__, each)
    return made


def read_config(path):
    """A config.pbtxt as Triton reads it; unknown fields are errors."""
    from google.protobuf import text_format

    return text_format.Parse(path.read_text(), _messages().ModelConfig())


def _messages():
    name = "tritonclient_model_config_pb2"
    if name not in sys.modules:
        file = BINDINGS / "tritonclient" / "grpc" / "model_config_pb2.py"
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # made by the protoc of one version before
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Repository:
    """Runs the ensembles of a model repository: the tokenizer as it is, encoders in ONNX Runtime."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.configs = {path.parent.name: read_config(path) for path in self.folder.glob("*/config.pbtxt")}
        self._loaded = {}

    def run(self, model, inputs):
        """Outputs of a model by name, or raises the TritonError that it answered with."""
        config = self.configs[model]
        for each in config.input:
            self._check(config, each, inputs[each.name])
        if config.platform == "ensemble":
            known = dict(inputs)
            for step in config.ensemble_scheduling.step:
                given = {name: known[source] for name, source in step.input_map.items()}
                made = self.run(step.model_name, given)
                known |= {target: made[name] for name, target in step.output_map.items()}
            found = {each.name: known[each.name] for each in config.output}
        elif config.backend == "python":
            found = self._python(model, config, inputs)
        else:
            found = self._onnx(model, inputs)
        for each in config.output:
            self._check(config, each, found[each.name])
        return found

    def _check(self, config, told, array):
        """Hold a tensor to its configuration, as Triton does."""
        from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

        kind = EnumTypeWrapper(told.DESCRIPTOR.fields_by_name["data_type"].enum_type).Name(told.data_type)
        assert array.dtype == _DTYPES[kind], (config.name, told.name, array.dtype)
        assert len(array) <= config.max_batch_size
        assert len(array.shape) == 1 + len(told.dims), (config.name, told.name, array.shape)
        assert all(a == b for a, b in zip(told.dims, array.shape[1:], strict=True) if a != -1), told.name

    def _python(self, model, config, inputs):
        request = InferenceRequest([Tensor(name, array) for name, array in inputs.items()])
        (answer,) = self.python_model(model, config).execute([request])
        if answer.error() is not None:
            raise answer.error()
        return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}

    def python_model(self, model, config):
        from google.protobuf import json_format

        if model not in self._loaded:
            sys.modules["triton_python_backend_utils"] = backend_module()
            path = self.folder / model / "1" / "model.py"
            spec = importlib.util.spec_from_file_location(f"{model}_model", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            made = module.TritonPythonModel()
            told = json_format.MessageToDict(config, preserving_proto_field_name=True)
            arguments = {"model_repository": str(self.folder / model), "model_version": "1"}
            made.initialize({**arguments, "model_config": json.dumps(told)})
            self._loaded[model] = made
        return self._loaded[model]

    def _onnx(self, model, inputs):
        import onnxruntime as ort

        if model not in self._loaded:
            options = ort.SessionOptions()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            file = self.folder / model / "1" / self.configs[model].default_model_filename
            self._loaded[model] = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        session = self._loaded[model]
        names = [each.name for each in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))
