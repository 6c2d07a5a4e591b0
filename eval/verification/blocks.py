"""Cut an exported encoder at its block borders, so that each block runs on the reference's own input.

A block is the embeddings, one encoder layer, or the pooler with the classifier. End to end, rounding flips
grow from layer to layer, and a correct engine cannot be told from a wrong one; block by block it can. All
blocks stay in one "stitched" graph, so one engine judges them, and what is inside a block (Q/DQ, what fuses
with what) is as in the deployed graph.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqbench.eval.metrics.results import LayerError, LayerErrors
from qdqbench.eval.verification.checks import MIN_LIMIT, BlockSums
from qdqbench.eval.verification.results import BlockCheck
from qdqbench.quantize.calibration.fakequant.quantizers import forward, name_outputs, smooth_input
from qdqbench.quantize.graph.index import module_of, prune, replace_nodes, tensor_values
from qdqbench.quantize.graph.rewrites import list_sequence_first, transpose_hidden
from qdqbench.quantize.models.attention import UNROUNDED
from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.inputs import MASK, select_inputs
from qdqbench.quantize.models.modules import get_hidden, record_first_inputs, resume_from
from qdqbench.quantize.models.rounding import fold_rounding
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.utils.arrays import Array, Batch, Float32, Int64
from qdqbench.quantize.utils.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

EMBEDDINGS, HEAD = "embeddings", "head"
# name of a block's output that the graph has as [length, batch, hidden]; MPNet's position bias reads another
TURNED_BACK = "/end_of_block"
FED, OF_HEAD = "/reference", "/head"  # names of inputs of blocks, and of one of several outputs of a head
FLOATS: dict[int, Any] = {TensorProto.FLOAT: np.dtype(np.float32), TensorProto.FLOAT16: np.dtype(np.float16)}


class Uncut(UserError):
    """The graph or the model cannot be cut into blocks, so that these cannot be checked."""


@dataclass(frozen=True)
class Block:
    """One block of a stitched graph."""

    name: str  # "embeddings", "layer.0", ..., "head"; of a head with several outputs "head.start_logits", ...
    input: str | None  # graph input that takes the reference's hidden state; None: the tokens
    output: str  # graph output: hidden state [batch, length, hidden], of the head one kind of answers


@dataclass
class BlockTensors:
    """Tensors of the reference in one block."""

    input: Float32 | None  # [batch, length, hidden]; None for the embeddings
    output: Float32  # hidden state, or the logits
    unquantized: Float32  # output of the FP32 model's block for the same input


@dataclass(frozen=True)
class Stitched:
    """A graph whose blocks do not depend on each other."""

    model: onnx.ModelProto
    blocks: tuple[Block, ...]  # in graph order
    types: dict[str, np.dtype[Any]]  # of the new graph inputs

    def feeds(self, tensors: Mapping[str, BlockTensors]) -> dict[str, Array]:
        """Return the reference's inputs of the blocks, by their names, as feeds of the graph in its types."""
        return {
            block.input: np.asarray(tensors[block.name].input, self.types[block.input])
            for block in self.blocks
            if block.input is not None
        }


def stitch(model: onnx.ModelProto, family: Family) -> Stitched:
    """Make the input of every block a graph input and its output a graph output; `model` is not changed.

    Raises:
        Uncut: the graph has no encoder layers as the exporter names them.
    """
    stitched = deepcopy(model)
    graph = stitched.graph
    values, other_way = tensor_values(stitched), list_sequence_first(stitched)
    free = [d.dim_param or d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]
    borders, answers = _borders(graph, family), _head_outputs(graph, free)
    blocks, types = list[Block](), dict[str, np.dtype[Any]]()
    replaced: dict[str, str] = {}
    before, behind = list[onnx.NodeProto](), list[onnx.NodeProto]()
    source: str | None = None
    for name, tensor in borders.items():
        end, reference, kind = tensor, f"{tensor}{FED}", values[tensor].elem_type
        types[reference], replaced[tensor] = FLOATS[kind], reference
        if tensor in other_way:  # a block takes and gives [batch, length, hidden] all the same
            end, replaced[tensor] = f"{tensor}{TURNED_BACK}", f"{reference}/turned"
            before.append(transpose_hidden(reference, replaced[tensor], f"/cut/{name}/before"))
            behind.append(transpose_hidden(tensor, end, f"/cut/{name}/behind"))
        shape = [*free, values[tensor].shape.dim[-1].dim_value]
        graph.input.append(helper.make_tensor_value_info(reference, kind, shape))
        graph.output.append(helper.make_tensor_value_info(end, kind, shape))
        blocks.append(Block(name, source, end))
        source = reference
    blocks += [Block(name, source, output) for name, output in answers.items()]
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = replaced.get(name, name)
    replace_nodes(stitched, [*before, *graph.node, *behind])
    return Stitched(stitched, tuple(blocks), types)


def _head_outputs(graph: onnx.GraphProto, free: list[Any]) -> dict[str, str]:
    """Return the graph's output by the block that makes it; several get a last axis, [batch, length, 1]."""
    if len(graph.output) == 1:
        return {HEAD: str(graph.output[0].name)}
    found = {value.name: f"{value.name}{OF_HEAD}" for value in graph.output}
    kind = graph.output[0].type.tensor_type.elem_type
    graph.initializer.append(helper.make_tensor("head/axis", TensorProto.INT64, [1], [-1]))
    del graph.output[:]
    for name, output in found.items():
        graph.node.append(helper.make_node("Unsqueeze", [name, "head/axis"], [output], name=output))
        graph.output.append(helper.make_tensor_value_info(output, kind, [*free, 1]))
    return {f"{HEAD}.{name}": output for name, output in found.items()}


def _borders(graph: onnx.GraphProto, family: Family) -> dict[str, str]:
    """Return output tensor of the embeddings and of each encoder layer, by block name."""
    found: dict[str, str] = {}
    ends: list[str] = []
    embedded = [f".{path}" for path in (family.embeddings_norm, family.embeddings_linear) if path]
    # a LayerNorm may be several nodes, of which the last makes its output
    computing = (node for node in graph.node if node.op_type != "Cast")
    for module, nodes in groupby(computing, lambda node: module_of(node.name)):
        place = family.place(module)
        if place and place.path == family.layer_end:
            ends.append(list(nodes)[-1].output[0])
        elif f".{module}".endswith(tuple(embedded)):
            found[EMBEDDINGS] = list(nodes)[-1].output[0]
    # a layer with sums of its own has one after the attention, and one at its end
    found |= {f"layer.{number}": end for number, end in enumerate(ends if family.layer_end else ends[1::2])}
    if EMBEDDINGS not in found or len(found) < 2:
        raise Uncut(
            "the graph does not name its embeddings and encoder layers, so it cannot be cut into blocks; "
            "export it with qdqbench"
        )
    return found


def block_of(stitched: Stitched, name: str) -> Block:
    return next(block for block in stitched.blocks if block.name == name)


def extract(stitched: Stitched, name: str, marked: Iterable[str] = ()) -> onnx.ModelProto:
    """Return the graph of one block alone, with tensors inside of it marked as graph outputs too."""
    block, values = block_of(stitched, name), tensor_values(stitched.model)
    alone = deepcopy(stitched.model)
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
    """Return float tensors that depend on a graph input, in topological order.

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


@contextmanager
def open_reference(session: Session) -> Iterator[tuple["PreTrainedModel", "PreTrainedModel | None"]]:
    """Yield the reference of an engine, and FP32 with its shifts; None where FP32 is the reference."""
    with session.fp32_shifted() if session.recipe.quantizes else nullcontext() as fp32:
        yield session.fp32_model if fp32 is None else session.fake_quant_model, fp32


def reference_blocks(
    model: "PreTrainedModel", unquantized: "PreTrainedModel | None", batch: dict[str, Int64], *, half: bool
) -> dict[str, BlockTensors]:
    """Run the reference on one batch and record the input and the output of each block.

    Args:
        model: the fake-quant model (or the FP32 model where nothing is quantized), on any device.
        unquantized: the FP32 model with the shifts of `model`, whose blocks get the same inputs; None where
            `model` is that model.
        batch: int64 [B, L] arrays.
        half: round each block's input and the biases of linears to FP16, as a graph of FP16 has them, so
            that both sides compute with the same numbers.

    Returns:
        By block name: "embeddings", "layer.0", ..., "head" or one for each of its outputs.
    """
    found: dict[str, BlockTensors] = {}
    layers = family_of(model.config).runs(model)
    twins = dict(unquantized.named_modules()) if unquantized is not None else {}
    numbers = count()

    def rounded(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_half(args[0]) if half else args[0], *args[1:])

    def keep(path: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        made = get_hidden(output)
        exact = get_hidden(twins[path](*args, **kwargs)) if twins else made
        found[f"layer.{next(numbers)}"] = BlockTensors(_array(args[0]), _array(made), _array(exact))
        last[:] = [made]

    last: list[torch.Tensor] = []
    with ExitStack() as hooks:
        if half:
            hooks.enter_context(_half_biases(model))
        for path in dict.fromkeys(layers):
            module = model.get_submodule(path)
            hooks.enter_context(module.register_forward_pre_hook(rounded))
            hooks.enter_context(module.register_forward_hook(partial(keep, path), with_kwargs=True))
        forward(model, batch)
    hidden = _half(last[0]) if half else last[0]
    (made, logits), (exact, exact_logits) = (
        _around(each, batch, hidden) for each in (model, unquantized or model)
    )
    first = {EMBEDDINGS: BlockTensors(None, made, exact)}
    names = [*name_outputs(model)]
    if len(names) == 1:
        return first | found | {HEAD: BlockTensors(_array(hidden), logits, exact_logits)}
    parts = [(logits[..., n, None], exact_logits[..., n, None]) for n in range(len(names))]
    heads = {
        f"{HEAD}.{name}": BlockTensors(_array(hidden), *part) for name, part in zip(names, parts, strict=True)
    }
    return first | found | heads


def check_blocks(  # noqa: PLR0913, PLR0917
    stitched: Stitched,
    run: Callable[[dict[str, Array]], Mapping[str, Array]],
    model: "PreTrainedModel",
    unquantized: "PreTrainedModel | None",
    batches: Iterable[Batch],
    rounding: float = MIN_LIMIT,
) -> list[BlockCheck]:
    """Feed each block the input that it has in the reference, and judge its output.

    Args:
        run: the stitched graph, or an engine of it.
        model: and `unquantized`, as of `reference_blocks`.
        batches: int64 [B, L] arrays.
        rounding: as of `BlockSums.check`.
    """
    half = np.dtype(np.float16) in stitched.types.values()
    sums = {block.name: BlockSums(block.name) for block in stitched.blocks}
    for batch in batches:
        tensors = reference_blocks(model, unquantized, batch, half=half)
        got = run(select_inputs(model, batch) | stitched.feeds(tensors))
        for block in stitched.blocks:
            made, output = tensors[block.name], got[block.output]
            sums[block.name].add(output, made.output, made.unquantized, batch[MASK])
    return [each.check(rounding) for each in sums.values()]


@contextmanager
def _half_biases(model: "PreTrainedModel") -> Iterator[None]:
    """Round the biases of linears: those behind centered inputs are large, and so is what they lose."""
    with fold_rounding(model):
        linears = [each for each in model.modules() if getattr(each, "in_features", None)]
        biases: list[Any] = [bias for each in linears if (bias := each.bias) is not None]
        before = [bias.data for bias in biases]
        try:
            for bias in biases:
                bias.data = _half(bias.data)
            yield
        finally:
            for bias, data in zip(biases, before, strict=True):
                bias.data = data


def _around(
    model: "PreTrainedModel", batch: dict[str, Int64], hidden: "torch.Tensor"
) -> tuple[Float32, Float32]:
    """Return what a model makes of the tokens before its layers, and of a hidden state after them."""
    runs = len(family_of(model.config).runs(model))
    with record_first_inputs(model) as embedded, resume_from(model, runs, hidden):
        logits = forward(model, batch)
    return _array(embedded[0]), _array(logits)


def _half(value: "torch.Tensor") -> "torch.Tensor":
    return value.half().float()


def _array(value: "torch.Tensor") -> Float32:
    array: Float32 = value.detach().float().cpu().numpy()
    return array


def layer_errors(  # noqa: PLR0913, PLR0917
    model: "PreTrainedModel",
    fp32: "PreTrainedModel",
    linears: Sequence[str],
    batch: Batch,
    corrections: Mapping[str, list[float]],
    moved: Mapping[int, list[float]] | None = None,
) -> LayerErrors:
    """Return relative errors of the outputs of INT8 linears and of blocks, in the order of the model.

    Args:
        model: the fake-quant model, `frozen`.
        fp32: the model that it was made from, with its shifts.
        linears: in INT8, full names.
        batch: int64 [B, L] arrays; padding is left out.
        corrections: what bias correction added, by linear; it is part of what is judged.
        moved: what shifts add to hidden states, by their number; errors are relative to FP32's own values.
    """
    from torch.nn import functional

    mask, alone, far = batch[MASK], dict[str, BlockSums](), dict[str, BlockSums]()

    def add(sums: dict[str, BlockSums], name: str, made: Array, exact: Array) -> None:
        sums.setdefault(name, BlockSums(name)).add(made, exact, exact, mask)

    def compare(name: str, linear: Any, args: "tuple[torch.Tensor, ...]", output: "torch.Tensor") -> None:
        """Add what a linear made, and what it would make of the same input unrounded."""
        bias = linear.bias
        if (correction := corrections.get(name)) is not None:
            bias = bias - bias.new_tensor(correction)
        weight = linear.__dict__.get(UNROUNDED, linear.weight)
        exact = functional.linear(smooth_input(linear.input_quantizer, args[0]), weight, bias)
        add(alone, name, _array(output), _array(exact))

    with ExitStack() as hooks:
        for name in linears:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(compare, name)))
        blocks = reference_blocks(model, fp32, batch, half=False)
    own = {
        f"layer.{number - 1}" if number else EMBEDDINGS: np.asarray(values, np.float32)
        for number, values in (moved or {}).items()
    }
    exact = reference_blocks(fp32, None, batch, half=False)
    for name, block in blocks.items():
        back = own.get(name, 0.0)
        add(alone, name, block.output - back, block.unquantized - back)
        if name == HEAD or name.startswith("layer."):
            add(far, name, block.output - back, exact[name].output - back)
    rows = [
        LayerError(
            name=name,
            what="linear" if name in linears else "block",
            isolated=error,
            cumulative=far[name].relative_error if name in far else None,
        )
        for name in dict.fromkeys([*linears, *alone])
        if name in alone and (error := alone[name].relative_error) is not None
    ]
    return LayerErrors(n=len(mask), rows=rows)
