"""The plan in NumPy, with the arithmetic of the kernels: a reference for tests and parity on any machine.

Integer sums are exact. An epilogue is one fused multiply-add in FP32; all else is FP32, and FP16 where a
tensor is. Kernels add in another order, so codes next to a rounding border may differ by one.
"""

from collections.abc import Callable, Mapping

import numpy as np

from qdqbench.quantize.engine.cuda import check
from qdqbench.quantize.engine.cuda.plan import (
    Attention,
    Embed,
    Head,
    Linear,
    Norm,
    Operation,
    Plan,
    Quantize,
    Quantized,
    StepKind,
    Tensor,
    View,
)
from qdqbench.quantize.engine.cuda.tokens import Tokens, pack_tokens, spread
from qdqbench.quantize.utils.arrays import Array, Float32, Int8, Int32

_EXACT = 1024  # products of two codes whose sum FP32 holds exactly
Arrays = Mapping[str, Array]


def interpret(plan: Plan, arrays: Arrays, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Return the answers of a batch int [B, L] by name; those of masked tokens are 0."""
    tokens = pack_tokens(plan, arrays, batch)
    values = {name: widen(state, plan.tensors[name]) for name, state in tokens.given.items()}
    for operation in plan.operations:
        values |= compute(operation, plan, arrays, values, tokens)
    answers = ((each.name, values[each.name]) for each in plan.head.answers)
    by_token = plan.head.pooling == "tokens"
    found = {name: spread(value, tokens) if by_token else value for name, value in answers}
    states = {name: values[name][:, : plan.tensors[name].own] for name in plan.states}
    return found | {name: spread(_single(state), tokens) for name, state in states.items()}


def widen(state: Array, tensor: Tensor) -> Array:
    """Return a state [T, channels] in FP16, as wide as its tensor."""
    return np.pad(state.astype(check.HALF), ((0, 0), (0, tensor.width - state.shape[1])))


def compute(
    operation: Operation, plan: Plan, arrays: Arrays, values: Mapping[str, Array], tokens: Tokens
) -> dict[str, Array]:
    """Return the tensors that one operation makes of `values`, by name; those of the head are the answers."""
    match operation:
        case Embed():
            parts = {"word": tokens.ids, "type": tokens.types, "position": tokens.positions}
            parts = {part: ids for part, ids in parts.items() if f"embed.{part}" in arrays}
            tables = [arrays[f"embed.{part}"][ids].astype(np.float32) for part, ids in parts.items()]
            return _forms(operation, arrays, _normalize(operation, plan, arrays, sum(tables[1:], tables[0])))
        case Norm():
            x = _single(values[operation.input])
            return _forms(operation, arrays, _normalize(operation, plan, arrays, x))
        case Quantize():
            return _forms(operation, arrays, _single(values[operation.input]))
        case Linear():
            return {operation.output: _linear(operation, plan, arrays, values, tokens.positions)}
        case Attention():
            return {operation.output: _attention(operation, plan, arrays, values, tokens)}
        case Head():
            return _head(operation, plan, arrays, values, tokens)


def round_codes(x: Array) -> Int8:
    return np.clip(np.rint(x), -128, 127).astype(np.int8)


def dot(codes: Int8, weight: Int8) -> Int32:
    """Return the exact product of codes [T, K] and [N, K]."""
    total = np.zeros((len(codes), len(weight)), np.int32)
    for start in range(0, codes.shape[1], _EXACT):
        one, other = (each[:, start : start + _EXACT].astype(np.float32) for each in (codes, weight))
        total += (one @ other.T).astype(np.int32)
    return total


def _single(array: Array) -> Float32:
    return array.astype(np.float32)


def _multiply_add(x: Array, scale: Array, bias: Array) -> Float32:
    """Return x * scale + bias of FP32 numbers, rounded once."""
    return (_single(x).astype(np.float64) * scale + bias).astype(np.float32)


def _normalize(operation: Embed | Norm, plan: Plan, arrays: Arrays, x: Float32) -> Float32:
    gamma, beta = (arrays[f"{operation.name}.{part}"] for part in ("gamma", "beta"))
    own = plan.tensors[operation.writes[0]].own
    return _multiply_add(_standardize(x, own, operation.epsilon), gamma, beta)


def _standardize(x: Float32, own: int, epsilon: float) -> Float32:
    """Return x [T, width] without its mean and deviation over its first `own` channels."""
    centered = x - x[:, :own].mean(axis=1, keepdims=True, dtype=np.float32)
    variance = np.square(centered[:, :own]).mean(axis=1, keepdims=True, dtype=np.float32)
    return _single(centered * (1 / np.sqrt(variance + np.float32(epsilon))))


def _forms(operation: Quantized, arrays: Arrays, y: Float32) -> dict[str, Array]:
    made: dict[str, Array] = {name: round_codes(y * arrays[f"{name}.multiplier"]) for name in operation.codes}
    return made | ({} if operation.half is None else {operation.half: y.astype(check.HALF)})


def _rotate(x: Float32, frequencies: Array, positions: Array) -> Float32:
    """Rotate pairs of channels of q and k, two thirds of the columns of x [T, 3 H]."""
    angles = _single(positions)[:, None, None] * _single(frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    made = x.copy()
    turned = 2 * x.shape[1] // 3
    one, other = x[:, :turned].reshape(len(x), -1, len(frequencies), 2).transpose(3, 0, 1, 2)
    pairs = _multiply_add(one, cos, -_single(other * sin)), _multiply_add(other, cos, _single(one * sin))
    made[:, :turned] = np.stack(pairs, axis=3).reshape(len(x), -1)
    return made


def _linear(
    operation: Linear, plan: Plan, arrays: Arrays, values: Mapping[str, Array], positions: Array
) -> Array:
    name, read = operation.name, values[operation.input]
    weight, bias = arrays[f"{name}.weight"], arrays[f"{name}.bias"]
    if operation.weight == "int8":
        x = _multiply_add(dot(read, weight), arrays[f"{name}.scale"], bias)
    else:
        x = _single((_single(read) @ _single(weight).T + _single(bias)).astype(check.HALF))
    if operation.rotary:
        x = _rotate(x, arrays[f"{name}.frequencies"], positions)
    if operation.gated:
        assert operation.activation is not None
        x = _STEPS[operation.activation](x[:, ::2]) * x[:, 1::2]
    elif operation.activation is not None:
        x = _STEPS[operation.activation](x)
    if operation.residual is not None:
        residual = values[operation.residual]
        int8 = residual.dtype == np.int8
        x = _multiply_add(residual, arrays[f"{name}.residual"], x) if int8 else x + _single(residual)
    if plan.tensors[operation.output].kind == "fp16":
        return x.astype(check.HALF)
    multiplier = arrays.get(f"{operation.output}.multiplier")
    return round_codes(x if multiplier is None else (x - np.float32(operation.center)) * multiplier)


def _attention(
    operation: Attention, plan: Plan, arrays: Arrays, values: Mapping[str, Array], tokens: Tokens
) -> Array:
    heads, size = operation.heads, operation.head_size
    scale, inverse = np.float32(operation.score_scale), operation.probability_multiplier

    def split(view: View) -> Float32:
        columns = values[view.tensor][:, view.column : view.column + heads * size]
        return _single(columns).reshape(len(columns), heads, size).transpose(1, 0, 2)

    query, key, value = (split(view) for view in operation.views)
    made = np.empty((len(tokens.ids), heads * size), np.float32)
    places = np.arange(max(np.diff(tokens.starts)) if operation.biased else 0)
    distances = places - places[:, None] + (plan.embed.span or 0) - 1
    for start, stop in zip(tokens.starts, tokens.starts[1:], strict=False):
        products = query[:, start:stop] @ key[:, start:stop].transpose(0, 2, 1)
        scores = products * scale
        if operation.window is not None:
            place = np.arange(stop - start)
            far = np.abs(place - place[:, None]) > operation.window
            scores = np.where(far, np.float32(-np.inf), scores)
        if operation.biased:
            bias = arrays[f"{operation.name}.bias"][:, distances[: stop - start, : stop - start]]
            scores = _multiply_add(products, np.asarray(scale), bias)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        total = weights.sum(axis=2, keepdims=True)
        if inverse is None:  # as a fused attention: divided last
            context = _single(weights.astype(check.HALF)) @ value[:, start:stop] / total
        elif operation.row_max:
            codes = np.rint(weights * np.float32(inverse))
            context = codes @ value[:, start:stop] / codes.sum(axis=2, keepdims=True)
        else:
            context = _single(round_codes(weights / total * np.float32(inverse))) @ value[:, start:stop]
        made[start:stop] = context.transpose(1, 0, 2).reshape(stop - start, -1)
    if inverse is None:
        made = _single(made.astype(check.HALF))
    made *= arrays[f"{operation.name}.scale"]
    return made.astype(check.HALF) if plan.tensors[operation.output].kind == "fp16" else round_codes(made)


def _head(
    operation: Head, plan: Plan, arrays: Arrays, values: Mapping[str, Array], tokens: Tokens
) -> dict[str, Array]:
    x = _single(values[operation.input][:, : plan.tensors[operation.input].own])
    first, stop = tokens.starts[:-1], tokens.starts[1:]
    match operation.pooling:
        case "first":
            x = x[first]
        case "last":
            x = x[stop - 1]
        case "mean":
            x = _single(np.add.reduceat(x, first, axis=0) / (stop - first)[:, None])
    for number, step in enumerate(operation.steps):
        if step.kind == "norm":
            gamma, beta = (arrays[f"{operation.name}.{number}.{part}"] for part in ("gamma", "beta"))
            x = _standardize(x, x.shape[1], step.epsilon or 0) * gamma + beta
        elif step.kind == "dense":
            x = x @ arrays[f"{operation.name}.{number}.weight"].T + arrays[f"{operation.name}.{number}.bias"]
        else:
            x = _STEPS[step.kind](x)
    return {each.name: x[:, each.place] for each in operation.answers}


def _gelu(x: Float32) -> Float32:
    from scipy.special import erf

    return _single(0.5 * x * (1 + erf(x * np.float32(np.sqrt(0.5)))))


def _gelu_tanh(x: Float32) -> Float32:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return _single(0.5 * x * (1 + np.tanh(inner)))


def _divide_by_length(x: Float32) -> Float32:
    return _single(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))


_STEPS: dict[StepKind, Callable[[Float32], Float32]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: _single(1 / (1 + np.exp(-x))),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "normalize": _divide_by_length,
}
