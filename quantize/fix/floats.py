"""What is floating point in a graph: masks that FP16 holds, and FP16 compute with FP32 islands."""

from collections import deque

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qdqbench.quantize.check.view import MOVES
from qdqbench.quantize.core.errors import CheckFailed, UserError
from qdqbench.quantize.core.limits import FP16_MAX
from qdqbench.quantize.encoders.attention import MASK_FILL
from qdqbench.quantize.graph.index import MAX_STEPS, GraphIndex, module_of, prune
from qdqbench.quantize.graph.precision import constants_to_initializers, drop_noop_casts, to_fp16

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_TO_SOFTMAX = (*MOVES, "Add", "Sub", "Mul", "Div", "Where", "Concat", "Neg", "Max", "Min", "And", "Clip")


def finite_masks(model: onnx.ModelProto) -> list[str]:
    """Replace what masks scores and does not fit FP16 by MASK_FILL, in place; exactly 0 behind a softmax too.

    Returns:
        Constants that were changed.
    """
    index = GraphIndex(model)
    stored = [(tensor.name, tensor) for tensor in model.graph.initializer]
    for node in model.graph.node:
        if node.op_type in ("Constant", "ConstantOfShape"):
            stored += [(node.output[0], item.t) for item in node.attribute if item.HasField("t")]
    changed = []
    for name, tensor in stored:
        if tensor.data_type not in _FLOATS:
            continue
        value = numpy_helper.to_array(tensor)
        low = ~(value >= -FP16_MAX) & ~np.isnan(value)
        if low.any() and _reaches_softmax(index, name):
            tensor.CopyFrom(
                numpy_helper.from_array(np.where(low, value.dtype.type(MASK_FILL), value), tensor.name)
            )
            changed.append(name)
    return changed


def _reaches_softmax(index: GraphIndex, name: str) -> bool:
    todo, seen = deque([name]), {name}
    while todo and len(seen) < 8 * MAX_STEPS:
        for node in index.consumers.get(todo.popleft(), ())[:MAX_STEPS]:
            if node.op_type == "Softmax":
                return True
            if node.op_type in _TO_SOFTMAX and node.output and node.output[0] not in seen:
                seen.add(node.output[0])
                todo.append(node.output[0])
    return False


def to_half(model: onnx.ModelProto) -> None:
    """Give an FP32 graph FP16 compute, in place: Q/DQ keep FP32 scales, LayerNorms compute in FP32.

    Raises:
        UserError: a constant does not fit FP16, or the types of the graph cannot be inferred.
    """
    try:
        constants_to_initializers(model)
        drop_noop_casts(model)
        to_fp16(model, _norms(model))
        prune(model)
    except CheckFailed as error:
        raise UserError(f"{error}; or keep the file in FP32 with --compute keep") from error
    except onnx.shape_inference.InferenceError as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"the types of the graph cannot be told ({why}); keep them with --compute keep"
        ) from error


def _norms(model: onnx.ModelProto) -> set[str]:
    """Modules of LayerNorms, whole or written out; their squares leave FP16 first."""
    found = {
        module_of(node.name)
        for node in model.graph.node
        if node.op_type in ("LayerNormalization", "Pow", "ReduceMean", "ReduceVariance") and node.name
    }
    own = {module for module in found if "norm" in module.rpartition(".")[2].lower()}
    return own or (found - {""})
