"""ONNX Runtime against the fake-quant model, layer by layer on one input: docs/explanation/the-graph.md."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqbench.eval.metrics.results import MAX_OUTPUT_ERROR, Parity, ParityRow
from qdqbench.eval.metrics.runners import session_of
from qdqbench.quantize.calibration.fakequant.quantizers import forward, name_outputs, smooth_input
from qdqbench.quantize.graph.index import GraphIndex, operator, tensor_values, use_of
from qdqbench.quantize.graph.rewrites import list_sequence_first
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.tasks.kinds.kind import join_outputs
from qdqbench.quantize.utils.arrays import Array, Float32, Float64, Int32, Int64

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIMIT_FRACTION = 0.005
LIMIT_STEP = 1
# exp turns the FP16 rounding of a score of 16 to 32, 2^-7, into a whole step of a probability near 1
SOFTMAX_STEP = 2
OUTPUT_FP16 = 0.02  # relative error of an output's worst sample; healthy tiny models reached 0.0035
FP16_EPSILON = 2.0**-11  # relative rounding of one FP16 operation
FP16_ROUNDINGS = 4  # from one quantizer to the next: product, factor, bias, and the cast
TINY = float(np.finfo(np.float32).tiny)
BORDER = 2.0**-10  # steps between a border and a value that FP32 may put on either side of it
# No sum smooths what these hand on: where ModelOpt (times 1 / scale) and ONNX (divides) round a border value
# to two codes, codes after the next LayerNorm or attention move by more than a step. So the values after
# these quantizers are fed. Not so q and k: DeBERTa's position terms read them unrounded.
PASSED_ON = ("residual_quantizer", "v_bmm_quantizer", "p_bmm_quantizer")
_OTHERS = {f"{name[0]}_bmm_quantizer": name for name in ("query", "key", "value")} | {
    "p_bmm_quantizer": "softmax",
    "residual_quantizer": "residual",
}


class Norm(NamedTuple):
    """LayerNorm in front of a quantizer. The terms that FP16 rounds may be larger than what they add up to:
    a centered linear adds a bias to products that nearly cancel it."""

    input: str
    added: Array  # absolute constants in its input, [channels] or a scalar
    weight: Array  # absolute, with the factors behind it
    bias: Array

    def terms(self, value: Array) -> Float64:
        """Return the size of the terms behind each element, for its input [..., channels]."""
        spread = np.maximum(_finite(value.astype(np.float64)).std(axis=-1, keepdims=True), TINY)
        terms: Float64 = self.weight * self.added / spread + self.bias
        return terms


@dataclass
class Boundary:
    """One quantized activation tensor: where it is cut, and the quantizers that read it."""

    tensor: str  # the graph's own value, before any Cast to the Q's type
    # full quantizer name -> scale; with `@3` where it is of run 3 of a shared layer
    quantizers: dict[str, float] = field(default_factory=dict)
    norm: Norm | None = None

    @property
    def reference(self) -> str:
        return f"{self.tensor}/reference"

    @property
    def fed(self) -> str:
        """Return the quantizer whose value it takes, or its output, which all others round alike."""
        return next(filter(_passes_on, self.quantizers), next(iter(self.quantizers)))


def compare_layers(
    onnx_model: onnx.ModelProto, model: "PreTrainedModel", batches: Iterable[dict[str, Int64]]
) -> Parity:
    """Compare a graph with Q/DQ with its fake-quant model, layer by layer (teacher forcing).

    The batches are int64 [B, L] arrays; padded ones make the mask count. Attention tensors and residuals have
    rows of their own.
    """
    forced, boundaries, outputs = force(onnx_model)
    other_way = list_sequence_first(onnx_model)  # [length, batch, ...]; else [batch, length, ...]
    outputs_of_model = [output.name for output in onnx_model.graph.output]
    session = session_of(forced.SerializeToString(), "the teacher-forced graph")
    half = any(i.data_type == TensorProto.FLOAT16 for i in onnx_model.graph.initializer)
    epsilon = FP16_EPSILON if half else 0.0
    rows = {name: _row_of(name, half) for b in boundaries for name in b.quantizers}
    errors: dict[str, list[float]] = {module: [0.0, 0.0] for module in outputs}
    of_samples: dict[str, list[Array]] = {name: [] for name in outputs_of_model}
    samples, padded, logits_diff = 0, False, 0.0
    for batch in batches:
        valid = batch["attention_mask"] != 0
        with _recorded(model, list(rows), [*outputs, *rows]) as (inputs, made):
            expected = forward(model, batch).float().cpu().numpy()
        feeds = {b.reference: _turn(_fed(b, inputs, made), b.tensor in other_way) for b in boundaries}
        asked = [*(b.tensor for b in boundaries), *(b.norm.input for b in boundaries if b.norm)]
        names = [*dict.fromkeys([*asked, *outputs.values(), *outputs_of_model])]
        ran = session.run(names, select_inputs(model, batch) | feeds)
        got = {name: _turn(value, name in other_way) for name, value in zip(names, ran, strict=True)}
        for boundary in boundaries:
            terms = boundary.norm.terms(got[boundary.norm.input]) if boundary.norm else None
            for name, scale in boundary.quantizers.items():
                own, reference = _of_tokens(got[boundary.tensor], valid), _of_tokens(inputs[name], valid)
                others = 0.0 if terms is None else _of_tokens(terms, valid) / scale
                _count(rows[name], own, reference, scale, epsilon, terms=others)
        for module, tensor in outputs.items():
            difference = _finite(got[tensor].astype(np.float64) - made[module])
            errors[module][0] += float(np.square(difference).sum())
            errors[module][1] += float(np.square(made[module].astype(np.float64)).sum())
        answers = join_outputs(got, outputs_of_model)
        for place, name in enumerate(outputs_of_model):
            one = expected if len(outputs_of_model) == 1 else expected[..., place]
            of_tokens = "length" in name_outputs(model)[name]
            of_samples[name].append(_mean_squares(got[name], one, valid if of_tokens else None))
        logits_diff = max(logits_diff, float(_finite(np.abs(answers - expected)).max()))
        samples += len(expected)
        padded |= not valid.all()
    for name, row in rows.items():
        module, kind = _place(name)
        squared, power = errors.get(module, (0.0, 0.0)) if kind == "input_quantizer" else (0.0, 0.0)
        row.output_rel_error = float(np.sqrt(squared / power)) if power else None
    ends = []
    for name, means in of_samples.items():
        apart, power = np.concatenate(means, axis=1)
        error = float(np.sqrt(apart.max() / max(power.mean(), TINY)))
        limit = OUTPUT_FP16 if half else MAX_OUTPUT_ERROR
        ends.append(_new_row(name, output_rel_error=error, output_limit=limit))
    return Parity(
        n=samples,
        padded=padded,
        rows=[*rows.values()],
        outputs=ends,
        logits_max_abs_diff=logits_diff,
        limit_fraction=LIMIT_FRACTION,
        limit_step=LIMIT_STEP,
        passed=all(row.holds for row in (*rows.values(), *ends)),
    )


def _mean_squares(got: Array, expected: Array, valid: Array | None) -> Float64:
    """Return the means by sample of the squared error and of the squared reference, [2, samples]."""
    apart = _finite(got.astype(np.float64) - expected)
    parts = [apart, expected.astype(np.float64)]
    if valid is None:
        return np.stack([np.square(each).reshape(len(each), -1).mean(axis=1) for each in parts])
    means = [np.square(each).reshape(*valid.shape, -1).mean(axis=2) for each in parts]
    return np.stack([(each * valid).sum(axis=1) / valid.sum(axis=1) for each in means])


def _fed(boundary: Boundary, inputs: dict[str, Float32], made: dict[str, Float32]) -> Float32:
    """Return the reference's value of a tensor, which the graph rounds to the reference's own codes."""
    if _passes_on(boundary.fed):
        return made[boundary.fed]
    value = inputs[boundary.fed]
    for name, scale in boundary.quantizers.items():
        away = made[name] - value  # towards the code of the reference
        near = np.abs(np.abs(away / np.float32(scale)) - 0.5) < BORDER
        if (other := near & (_codes(value, scale) != _codes(made[name], scale))).any():
            value = np.where(other, value + np.copysign(np.float32(BORDER * scale), away), value)
    return value


def _turn(value: Array, other_way: bool) -> Array:
    return np.ascontiguousarray(np.swapaxes(value, 0, 1)) if other_way else value


def _of_tokens(value: Array, valid: Array) -> Array:
    """Drop the padding of a tensor [batch, length, ...] or [batch, heads, length, ...], of no other.

    Where all padding has one position, as in RoBERTa and MPNet, it is one vector over and over: a value at a
    border of rounding would count as often.
    """
    if value.ndim == 4:
        value = np.swapaxes(value, 1, 2)
    return value[valid] if value.shape[:2] == valid.shape else value


def force(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Boundary], dict[str, str]]:
    """Cut a graph at the input of every activation quantizer.

    Each cut tensor becomes a graph output, and its readers get a new FP32 input instead: the Q as it is, the
    others cast to their type.

    Returns:
        The cut graph, the boundaries in graph order, and the output tensor of each quantized linear.
    """
    forced = onnx.ModelProto()
    forced.CopyFrom(model)
    index = GraphIndex(forced)
    boundaries = _boundaries(index)
    types = {name: value.elem_type for name, value in tensor_values(forced).items()}
    outputs = _linear_outputs(index, boundaries)
    replaced: dict[str, str] = {}
    casts = []
    for boundary in boundaries.values():
        name = boundary.tensor
        forced.graph.input.append(helper.make_tensor_value_info(boundary.reference, TensorProto.FLOAT, None))
        replaced[f"{name}_fp32"] = replaced[name] = boundary.reference
        if types[name] != TensorProto.FLOAT:
            replaced[name] = f"{boundary.reference}_cast"
            casts.append(helper.make_node("Cast", [boundary.reference], [replaced[name]], to=types[name]))
    for node in forced.graph.node:
        if node.op_type == "Cast" and node.input[0] in boundaries:
            continue  # the graph's own cast of a cut tensor is dead now
        for position, name in enumerate(node.input):
            node.input[position] = replaced.get(name, name)
    nodes = [*casts, *forced.graph.node]
    del forced.graph.node[:]
    forced.graph.node.extend(nodes)
    norms = [boundary.norm.input for boundary in boundaries.values() if boundary.norm]
    for name in dict.fromkeys([*boundaries, *outputs.values(), *norms]):
        forced.graph.output.append(helper.make_tensor_value_info(name, types[name], None))
    return forced, list(boundaries.values()), outputs


def _boundaries(index: GraphIndex) -> dict[str, Boundary]:
    found: dict[str, Boundary] = {}
    for node in index.graph.node:
        if node.op_type != "QuantizeLinear" or index.constant(node.input[0]) is not None:
            continue
        producer = index.producers.get(node.input[0])
        cast = producer is not None and producer.op_type == "Cast"
        tensor = producer.input[0] if producer is not None and cast else node.input[0]
        scale = index.constant(node.input[1])
        assert scale is not None, f"{node.name} has no constant scale"
        boundary = found.setdefault(tensor, Boundary(tensor, norm=_find_norm(index, tensor)))
        boundary.quantizers[use_of(node.name)] = float(scale)
    return found


def _find_norm(index: GraphIndex, tensor: str) -> Norm | None:
    factor = np.ones(())
    for _, node in index.back(tensor, ("Cast", "Mul")):
        if node is None:
            continue
        if scaled := index.scaled(node):
            factor = factor * _absolute(numpy_helper.to_array(scaled[1]))
        elif operator(node) == "LayerNormalization":
            weight, bias = (index.constant(name) for name in node.input[1:3])
            if weight is None or bias is None:
                return None
            added = _sum_constants(index, node.input[0], 2)
            return Norm(node.input[0], added, _absolute(weight) * factor, _absolute(bias) * factor)
    return None


def _sum_constants(index: GraphIndex, tensor: str, adds: int) -> Array:
    """Return the sum of the absolute constants in the last sums of a tensor."""
    if (value := index.constant(tensor)) is not None:
        return _absolute(value)
    node, _ = index.origin(tensor, ("Cast",))
    if node is None or operator(node) != "Add" or not adds:
        return np.zeros(())
    first, second = (_sum_constants(index, name, adds - 1) for name in node.input)
    return first + second


def _absolute(value: Array) -> Array:
    absolute: Array = np.abs(value.astype(np.float64))
    return absolute


def _linear_outputs(index: GraphIndex, boundaries: dict[str, Boundary]) -> dict[str, str]:
    """Return the last tensor that each use of a quantized linear makes (after its bias)."""
    places = [_place(name) for b in boundaries.values() for name in b.quantizers]
    linears = {module for module, kind in places if kind == "input_quantizer"}
    return {
        use_of(n.name): n.output[0]
        for n in index.graph.node
        if use_of(n.name) in linears and n.op_type != "Cast"
    }


def _place(quantizer: str) -> tuple[str, str]:
    """Return the module of a quantizer, with the run where that is shared, and its kind."""
    name, at, run = quantizer.partition("@")
    module, _, kind = name.rpartition(".")
    return f"{module}{at}{run}", kind


def _passes_on(quantizer: str) -> bool:
    """Return whether no linear adds many elements of a quantizer's output."""
    return _place(quantizer)[1] in PASSED_ON


@contextmanager
def _recorded(
    model: "PreTrainedModel", quantizers: list[str], others: list[str]
) -> Iterator[tuple[dict[str, Float32], dict[str, Float32]]]:
    modules = dict(model.named_modules())
    inputs: dict[str, Float32] = {}
    outputs: dict[str, Float32] = {}

    def before(names: Iterator[str], quantizer: Any, args: Any) -> None:
        inputs[next(names)] = smooth_input(quantizer, args[0]).detach().float().cpu().numpy()

    def behind(names: Iterator[str], _: Any, __: Any, output: Any) -> None:
        outputs[next(names)] = output.detach().float().cpu().numpy()

    with ExitStack() as hooks:
        for name, uses in _uses(quantizers).items():
            hooks.enter_context(modules[name].register_forward_pre_hook(partial(before, iter(uses))))
        for name, uses in _uses(others).items():
            hooks.enter_context(modules[name].register_forward_hook(partial(behind, iter(uses))))
        yield inputs, outputs


def _uses(names: list[str]) -> dict[str, list[str]]:
    """Return names by module; those of a shared one in the order of its calls."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition("@")[0], []).append(name)
    return found


def _count(  # noqa: PLR0913  all of one tensor
    row: ParityRow, got: Array, reference: Float32, scale: float, epsilon: float, *, terms: Float64 | float
) -> None:
    """Add the codes of one tensor: compared, differing, largest step, and those at a border."""
    codes = _codes(reference, scale)
    step = np.abs(_codes(got, scale) - codes)
    apart = np.abs(_steps(got, scale) - _steps(reference, scale))
    # the terms of a sum may be larger than the sum, and as large as other sums of the tensor
    magnitude = np.abs(codes) + np.abs(codes).mean() + terms
    explained = apart <= BORDER + FP16_ROUNDINGS * epsilon * magnitude
    row.int8_values += step.size
    row.differing += int(np.count_nonzero(step))
    row.max_step = max(row.max_step, int(step.max()))
    row.at_border += int(np.count_nonzero((step == 1) & explained))


def _steps(values: Array, scale: float) -> Float64:
    return _finite(values.astype(np.float64) / scale)


def _codes(values: Array, scale: float) -> Int32:
    codes: Int32 = np.clip(np.rint(_finite(values.astype(np.float32) / np.float32(scale))), -128, 127)
    return codes.astype(np.int32)


def _finite(values: Array) -> Array:
    return np.nan_to_num(values, nan=1e6, posinf=1e6, neginf=-1e6)  # JSON has no infinity


def _row_of(quantizer: str, half: bool) -> ParityRow:
    module, kind = _place(quantizer)
    base, at, run = module.partition("@")
    name = f"{base}.{_OTHERS[kind]}{at}{run}" if kind in _OTHERS else module
    step = SOFTMAX_STEP if half and kind == "p_bmm_quantizer" else LIMIT_STEP
    return _new_row(name, output_rel_error=None, limit=LIMIT_FRACTION, step_limit=step)


def _new_row(name: str, **fields: Any) -> ParityRow:
    return ParityRow(name=name, int8_values=0, differing=0, max_step=0, **fields)
