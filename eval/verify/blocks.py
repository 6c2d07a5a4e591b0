"""Cut an exported encoder at its block borders, so that each block runs on the reference's own input.

A block is the embeddings, one encoder layer, or the pooler with the classifier. End to end, rounding flips
grow from layer to layer, and a correct engine cannot be told from a wrong one; block by block it can. All
blocks stay in one "stitched" graph, so one engine judges them, and what is inside a block (Q/DQ, what fuses
with what) is as in the deployed graph.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqbench.quantize.core.arrays import Array, Float32, Int64
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.fakequant.quantizers import forward
from qdqbench.quantize.families.family import Family
from qdqbench.quantize.families.known import family_of
from qdqbench.quantize.graph.index import module_of, prune, tensor_values

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


EMBEDDINGS, HEAD = "embeddings", "head"
FLOATS: dict[int, Any] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
}


class Uncut(UserError):
    """The graph or the model cannot be cut into blocks, so that these cannot be checked."""


@dataclass(frozen=True)
class Block:
    """One block of a stitched graph."""

    name: str  # "embeddings", "layer.0", ..., "head"
    input: str | None  # graph input that takes the reference's hidden state; None: the tokens
    output: str  # graph output: hidden state [batch, length, hidden], of the head the logits [batch, labels]


@dataclass(frozen=True)
class Stitched:
    """A graph whose blocks do not depend on each other."""

    model: onnx.ModelProto
    blocks: tuple[Block, ...]  # in graph order
    types: dict[str, np.dtype[Any]]  # of the new graph inputs
    family: Family  # whose module names the graph has

    def feeds(self, inputs: Mapping[str, Float32]) -> dict[str, Array]:
        """Hidden states by block name as feeds of the graph, in its types."""
        return {
            block.input: inputs[block.name].astype(self.types[block.input])
            for block in self.blocks
            if block.input is not None
        }


@dataclass
class BlockTensors:
    """What the reference did in one block."""

    input: Float32 | None  # [batch, length, hidden]; None for the embeddings
    output: Float32  # hidden state, or the logits
    unquantized: Float32  # output of the FP32 model's block for the same input


def stitch(model: onnx.ModelProto, family: Family) -> Stitched:
    """Make the input of every block a graph input and its output a graph output; `model` is not changed.

    Raises:
        Uncut: the graph has no encoder layers as the exporter names them, or they end without a LayerNorm.
    """
    stitched = onnx.ModelProto()
    stitched.CopyFrom(model)
    graph = stitched.graph
    borders = _borders(graph, family)
    values = tensor_values(stitched)
    blocks, types, replaced, source = [], {}, {}, None
    for name, tensor in borders.items():
        blocks.append(Block(name, source, tensor))
        source = replaced[tensor] = f"{tensor}/reference"
        types[source] = FLOATS[values[tensor].elem_type]
    blocks.append(Block(HEAD, source, graph.output[0].name))
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = replaced.get(name, name)
    free = [d.dim_param or d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]
    for tensor in borders.values():
        shape = [*free, values[tensor].shape.dim[-1].dim_value]
        for place, title in ((graph.input, replaced[tensor]), (graph.output, tensor)):
            place.append(helper.make_tensor_value_info(title, values[tensor].elem_type, shape))
    return Stitched(stitched, tuple(blocks), types, family)


def _borders(graph: onnx.GraphProto, family: Family) -> dict[str, str]:
    """Output tensor of the embeddings and of each encoder layer, by block name."""
    found: dict[str, str] = {}
    if family.layer_end is None:
        raise Uncut(f"the layers of family {family.name} do not end with a LayerNorm, where blocks are cut")
    for node in graph.node:
        module = module_of(node.name)
        place = family.place(module)
        if place and place.path == family.layer_end:
            name = f"layer.{place.number}"
        elif f".{module}".endswith(f".{family.embeddings_norm}"):
            name = EMBEDDINGS
        else:
            continue
        if node.op_type != "Cast":
            found[name] = node.output[0]  # the last node of a LayerNorm in several nodes
    if EMBEDDINGS not in found or len(found) < 2:
        raise Uncut(
            "the graph does not name its embeddings and encoder layers, so it cannot be cut into blocks; "
            "export it with qdqbench"
        )
    return found


def block_of(stitched: Stitched, name: str) -> Block:
    """A block by its name."""
    return next(block for block in stitched.blocks if block.name == name)


def extract(stitched: Stitched, name: str, marked: Iterable[str] = ()) -> onnx.ModelProto:
    """The graph of one block alone, with tensors inside of it marked as graph outputs too."""
    block, values = block_of(stitched, name), tensor_values(stitched.model)
    alone = onnx.ModelProto()
    alone.CopyFrom(stitched.model)
    graph = alone.graph
    wanted = dict.fromkeys([*marked, block.output])
    del graph.output[:]
    graph.output.extend(helper.make_tensor_value_info(t, values[t].elem_type, None) for t in wanted)
    prune(alone)
    read = {tensor for node in graph.node for tensor in node.input}
    inputs = [value for value in graph.input if value.name in read]
    del graph.input[:]
    graph.input.extend(inputs)
    return alone


def computed_floats(model: onnx.ModelProto) -> list[str]:
    """Float tensors that depend on a graph input, in topological order.

    Without the copies (casts, reshapes, transposes) and the outputs of Q and DQ: an engine has no tensor of
    its own for them, and marking them would break the pattern that makes its INT8 kernels.
    """
    copies = {"Cast", "Reshape", "Transpose", "Unsqueeze", "QuantizeLinear", "DequantizeLinear"}
    values = tensor_values(model)
    live, found = {value.name for value in model.graph.input}, []
    for node in model.graph.node:
        if live.isdisjoint(node.input):
            continue
        live.update(node.output)
        if node.op_type not in copies:
            found += [name for name in node.output if name and values[name].elem_type in FLOATS]
    return found


def reference_blocks(
    model: "PreTrainedModel",
    unquantized: "PreTrainedModel | None",
    batch: dict[str, Int64],
    *,
    half: bool,
) -> dict[str, BlockTensors]:
    """Run the reference on one batch and record the input and the output of each block.

    Args:
        model: the fake-quant model (or the FP32 model where nothing is quantized), on any device.
        unquantized: the FP32 model, whose blocks get the same inputs; None where `model` is that model.
        batch: int64 [B, L] arrays.
        half: round each block's input to FP16, as a graph with FP16 borders gets it, so that both sides
            start from the same numbers.

    Returns:
        By block name: "embeddings", "layer.0", ..., "head".
    """
    found: dict[str, BlockTensors] = {}
    twins = dict(unquantized.named_modules()) if unquantized is not None else {}
    hooks = []
    for name, path in _torch_blocks(model).items():
        module = model.get_submodule(path)
        hooks.append(module.register_forward_pre_hook(_rounded(half), with_kwargs=True))
        hooks.append(module.register_forward_hook(_recorder(found, name, twins.get(path)), with_kwargs=True))
    try:
        logits = forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    pooled = found[HEAD]
    pooled.output = _array(logits)
    pooled.unquantized = pooled.output if unquantized is None else _head(unquantized, pooled)
    return found


def _torch_blocks(model: "PreTrainedModel") -> dict[str, str]:
    """Module of each block by block name; the head's is the one where it starts."""
    family = family_of(model.config)
    found = {EMBEDDINGS: f"{model.base_model_prefix}.{family.embeddings}"}
    found |= {f"layer.{family.layer_of(name)}": name for name in family.layer_names(model)}
    return found | {HEAD: _head_names(model)[0]}


def _head_names(model: "PreTrainedModel") -> list[str]:
    try:
        return family_of(model.config).head_names(model)
    except UserError as error:
        raise Uncut(str(error)) from error


def _rounded(half: bool) -> Any:
    """Pre-hook that rounds a hidden state through FP16; tokens pass."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not half:
            return args, kwargs
        if args and args[0].is_floating_point():
            return (args[0].half().float(), *args[1:]), kwargs
        if "hidden_states" in kwargs:
            kwargs = kwargs | {"hidden_states": kwargs["hidden_states"].half().float()}
        return args, kwargs

    return hook


def _recorder(found: dict[str, BlockTensors], name: str, twin: Any) -> Any:
    """Hook that keeps a block's input and output, and the output of the FP32 twin of the block."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        taken = None if name == EMBEDDINGS or hidden is None else _array(hidden)
        made = _array(output)
        found[name] = BlockTensors(taken, made, made if twin is None else _array(twin(*args, **kwargs)))

    return hook


def _head(model: "PreTrainedModel", tensors: BlockTensors) -> Float32:
    """Logits of the FP32 model from what the first module of its head made."""
    import torch

    with torch.inference_mode():
        made = torch.from_numpy(tensors.unquantized).to(next(model.parameters()).device)
        for name in _head_names(model)[1:]:
            made = model.get_submodule(name)(made)
        return _array(made)


def _array(value: "torch.Tensor | tuple[torch.Tensor, ...]") -> Float32:
    tensor = value[0] if isinstance(value, tuple) else value
    array: Float32 = tensor.detach().float().cpu().numpy()
    return array
