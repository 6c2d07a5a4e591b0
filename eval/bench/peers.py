"""PyTorch and torch.compile as baselines of INT8 in their best form, on padded batches and without padding.

Padded: SDPA, CUDA graphs and max-autotune, and TF32 where the engines have it. They take the attention mask
as the engines do, at fixed shapes too, where it is all ones: without one, transformers makes its own while a
graph is captured or traced, and SDPA then computes attention in FP32.

Unpadded, the strongest: tokens of all rows lie one after the other, and attention takes where each starts. It
is flash-attention's varlen form, or flex attention where a bias is added. Each size of a launch is one CUDA
graph. In FP8 its linears are, in E4M3 with one static scale for an input and one for a weight.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from qdqbench.quantize.calibration.fakequant.quantizers import name_outputs
from qdqbench.quantize.models.families.family import QKV
from qdqbench.quantize.models.families.known import TYPES, family_of
from qdqbench.quantize.models.inputs import MASK, TOKENS
from qdqbench.quantize.models.load import use_attention
from qdqbench.quantize.tasks.kinds.kind import join_outputs
from qdqbench.quantize.utils.arrays import Batch, Int64
from qdqbench.quantize.utils.capture import capture_graph
from qdqbench.quantize.utils.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WARM_CALLS = 3
OUTPUT = "answers"


def sdpa_model(model: "PreTrainedModel", precision: str, device: str) -> "PreTrainedModel":
    import torch

    use_attention(model, "sdpa")
    if model.config._attn_implementation != "sdpa":
        raise UserError(
            "transformers did not switch to SDPA attention; use a version that pyproject.toml allows"
        )
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    return model.to(device=device, dtype=dtypes[precision]).eval()  # type: ignore[no-any-return, call-arg]


def example(inputs: Sequence[str], batch: int, length: int, device: str) -> "dict[str, torch.Tensor]":
    import torch

    shape = (batch, length)
    return {
        name: (torch.ones if name == MASK else torch.zeros)(*shape, dtype=torch.long, device=device)
        for name in inputs
    }


class TorchRun:
    """A `measure.Bound` of a PyTorch model on these input buffers, with a CUDA graph where it captures."""

    def __init__(
        self,
        forward: "Callable[..., Any]",
        inputs: "dict[str, torch.Tensor]",
        how: str,
        *,
        graph: bool = True,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        import torch

        self.torch, self.forward, self.inputs = torch, forward, inputs
        self.outputs: dict[str, torch.Tensor] = {}
        self.stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: Any = None
        torch.cuda.synchronize()
        for _ in range(WARM_CALLS):
            self._call()
        self.stream.synchronize()
        why = self._capture() if graph else "launched one by one"
        ran = f"no CUDA graph ({why})" if why else "CUDA graph"
        self.detail = f"{how}, {ran}" if how else ran

    def launch(self) -> None:
        if self.graph is None:
            self._call()
            return
        with self.torch.cuda.stream(self.stream):
            self.graph.replay()

    def _call(self) -> None:
        with self.torch.cuda.stream(self.stream), self.torch.inference_mode():
            self.outputs = {OUTPUT: self.forward(**self.inputs)}

    def _capture(self) -> str | None:
        """Capture one inference; returns why it does not capture."""
        graph = self.torch.cuda.CUDAGraph()
        try:
            with self.torch.inference_mode(), capture_graph(graph, stream=self.stream):
                self.outputs = {OUTPUT: self.forward(**self.inputs)}
        except RuntimeError as error:
            self.torch.cuda.synchronize()
            self._call()
            return " ".join(str(error).split())[:160]
        self.graph = graph
        return None


def eager_forward(model: "PreTrainedModel") -> "Callable[..., torch.Tensor]":
    names = list(name_outputs(model))
    return lambda **inputs: join_outputs(model(**inputs), names)


def compiled_forward(model: "PreTrainedModel", mode: str, *, dynamic: bool) -> "Callable[..., torch.Tensor]":
    import torch

    # captured by `TorchRun`, mode "default" is "reduce-overhead" less its copies of inputs and its guards

    return torch.compile(eager_forward(model), mode=mode, dynamic=dynamic, fullgraph=True)


@contextlib.contextmanager
def tf32_allowed() -> Iterator[None]:
    """Allow TF32 for FP32 matrix products, as engine builders do by default."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# RoBERTa's are XLM-R and CamemBERT too
FAMILIES = ("bert", "roberta", "electra", "distilbert", "albert", "mpnet", "modernbert")
REFUSED = {"deberta-v2": "its attention adds relative positions"}
TOKEN_STEP = 64  # launches are rounded up to it, for tensor cores
FIRST_FP8 = (8, 9)  # compute capability
FP8_ROWS = 64  # whose largest inputs of linears are the scales
LARGEST_FP8 = 448.0  # of E4M3
LAUNCH_TOKENS = (2048, 4096, 8192, 16384, 32768, 65536)  # sizes of a launch that are tried
# that a layer is compiled for; torch runs further ones eagerly, and by default those behind 8
_MOST_SIZES = 256
Int32 = npt.NDArray[np.int32]


class Scaled(NamedTuple):
    """A weight in E4M3 [N, K], its scale, and that of its linear's input."""

    codes: "torch.Tensor"
    scale: "torch.Tensor"
    input_scale: "torch.Tensor"


@dataclass(frozen=True)
class Packing:
    """Rows packed into launches of one size.

    Each launch is one int32 vector: token ids, positions and types [tokens each], then where each row starts,
    [sequences + 1]. What is not used holds zeros, and empty rows at the end.
    """

    tokens: int  # of a launch
    sequences: int  # of a launch, at most
    longest: int  # tokens of a row
    launches: list[Int32]
    counts: list[int]  # rows of each launch

    def first_tokens(self, launch: int) -> Int64:
        starts = self.launches[launch][3 * self.tokens :]
        return starts[: self.counts[launch]].astype(np.int64)


def refusal(model_type: str, family: str) -> str:
    if family in FAMILIES:
        return ""
    return f"no unpadded form for {model_type}: {REFUSED.get(family, 'its layers are not BERT layers')}"


def unpadded_rows(batch: Batch) -> list[Batch]:
    return [
        {name: array[row, mask != 0] for name, array in batch.items() if name != MASK}
        for row, mask in enumerate(batch[MASK])
    ]


def pack_rows(rows: Sequence[Batch], launches: int, positions_of: Callable[[Int64], Int64]) -> Packing:
    """Pack rows, int64 [length] arrays by name, in their order into launches with about as many tokens each.

    `launches` is no more than there are rows; `positions_of` gives the positions of a row's token ids.
    """
    ends = np.cumsum([len(row[TOKENS]) for row in rows])
    edges = np.searchsorted(ends, ends[-1] * np.arange(1, launches) / launches, side="left") + 1
    parts = [part for part in np.split(np.arange(len(rows)), edges) if len(part)]
    lengths = [[len(rows[index][TOKENS]) for index in part] for part in parts]
    tokens = -(-max(map(sum, lengths)) // TOKEN_STEP) * TOKEN_STEP
    sequences, longest = max(map(len, parts)), max(map(max, lengths))
    packed = []
    for part, sizes in zip(parts, lengths, strict=True):
        flat = np.zeros(3 * tokens + sequences + 1, dtype=np.int32)
        ids, positions, types, starts = np.split(flat, [tokens, 2 * tokens, 3 * tokens])
        starts[1 : len(part) + 1] = np.cumsum(sizes)
        starts[len(part) + 1 :] = sum(sizes)
        for index, start, size in zip(part, starts, sizes, strict=False):
            row = rows[index]
            ids[start : start + size] = row[TOKENS]
            positions[start : start + size] = positions_of(row[TOKENS])
            types[start : start + size] = row.get(TYPES, 0)
        packed.append(flat)
    return Packing(tokens, sequences, longest, packed, list(map(len, parts)))


def launch_counts(tokens: int, rows: int) -> list[int]:
    return list(dict.fromkeys(max(1, min(rows, -(-tokens // size))) for size in LAUNCH_TOKENS))


class UnpaddedEncoder:
    """A transformers model on packed tokens; its base model must run nowhere else from now on."""

    how, most = "packed tokens, varlen attention, torch.compile", math.inf  # tokens of a launch

    def __init__(self, model: "PreTrainedModel", *, compiled: bool = True) -> None:
        import torch
        from transformers.activations import ACT2FN
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        config, family = model.config, family_of(model.config)
        base = getattr(model, model.base_model_prefix)
        self.heads = int(config.num_attention_heads)
        self.positions_from = int(config.pad_token_id) if family.positions_follow_padding else None
        self.activation: Any = ACT2FN[getattr(config, family.activation)]
        self.embeddings: Any = base.get_submodule(family.embeddings)
        self.project: Any = dict(base.named_modules()).get(family.embeddings_linear)
        weights = {name: _layer_weights(model, name) for name in family.layer_names(model)}
        self.layers: list[list[Any]] = [weights[name] for name in family.runs(model)]
        rotary = getattr(base, "rotary_emb", None) if family.rotary else None
        self.turns: Any = rotary and partial(_turns, rotary)
        self.kinds = [*config.layer_types] if rotary else []
        self.window = int(config.local_attention) // 2 if rotary else None
        self.final_norm: Any = getattr(base, "final_norm", torch.nn.Identity())
        self.bias = _bias_of(base.encoder, family.positions(config)) if family.name == "mpnet" else None
        self.blocks: Any = _find_blocks
        last_norm: Any = model.get_submodule(f"{family.layer_names(model)[0]}.{[*family.norms][1]}")
        self.eps = float(last_norm.eps)
        self.of_tokens = any("length" in axes for axes in name_outputs(model).values())
        pooling = getattr(config, "classifier_pooling", "cls")  # a ModernBERT's classifier
        self.pooling = str(getattr(getattr(model, "pooling", None), "mode", pooling))
        self._layer: Callable[..., torch.Tensor] = packed_layer
        self._embed: Callable[..., torch.Tensor] = self._embedded
        if compiled:
            torch._dynamo.config.recompile_limit = _MOST_SIZES
            self._layer = torch.compile(packed_layer, dynamic=False)
            self.turns = self.turns and torch.compile(self.turns, dynamic=False)
            if self.bias is not None:
                self.blocks = torch.compile(_find_blocks, dynamic=False)
            self._embed = torch.compile(self._embedded, dynamic=False)
        pooler, activate = getattr(base, "pooler", None), getattr(base, "pooler_activation", None)  # ALBERT's
        self._states: Any = None

        def encoded(*_: Any, **__: Any) -> Any:
            """Stand in for the encoder, so that the model's own head reads the packed states."""
            states, pooled = self._states, None
            if pooler is not None:
                pooled = pooler(states) if activate is None else activate(pooler(states[:, 0]))
            return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)

        base.forward = encoded
        self._head = eager_forward(model)

    def positions_of(self, ids: Int64) -> Int64:
        """Return the positions int64 [length] of a row, as the model counts them."""
        if self.positions_from is None:
            return np.arange(len(ids), dtype=np.int64)
        real = ids != self.positions_from
        return cast("Int64", np.cumsum(real) * real + self.positions_from)

    def forward(self, packed: "torch.Tensor", *, tokens: int, longest: int) -> "torch.Tensor":
        """Return the answers of a launch of a `Packing`: [sequences, width], or of tokens [tokens, width]."""
        import torch

        ids, positions, types = packed[: 3 * tokens].view(3, tokens)
        starts = packed[3 * tokens :]
        hidden = self._embed(ids[None], positions[None], types[None])[0]
        sizes = starts, longest, self.heads, self.eps, self.activation
        for more, weights in zip(self._of_layers(hidden, positions, starts), self.layers, strict=True):
            hidden = self._layer(hidden, *sizes, *weights, **more)
        hidden = self.final_norm(hidden)
        states = self._states = hidden[None] if self.of_tokens else self._reduced(hidden, starts)[:, None]
        ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        answers = self._head(**{TOKENS: ids, MASK: torch.ones_like(ids)})
        return answers[0] if self.of_tokens else answers

    def use_fp8(self, packing: Packing) -> None:
        """Round the linears of layers to E4M3, with scales from the rows of a launch."""
        import torch

        packed = torch.from_numpy(packing.launches[0]).to(self.layers[0][0].device)
        real = slice(int(packing.launches[0][-1]))  # attention leaves what pads a launch undefined
        ids, positions, types = packed[: 3 * packing.tokens].view(3, packing.tokens)[:, real]
        rounded = []
        with torch.inference_mode():
            hidden = self._embedded(ids[None], positions[None], types[None])[0]
            sizes = packed[3 * packing.tokens :], packing.longest, self.heads, self.eps, self.activation
            for more, weights in zip(self._of_layers(hidden, positions, sizes[0]), self.layers, strict=True):
                seen: list[torch.Tensor] = []
                more.pop("blocks", None)  # nothing is compiled here
                hidden = packed_layer(hidden, *sizes, *weights, **more, seen=seen)
                linears = dict(zip(LINEARS, seen, strict=True))
                rounded.append([_round(each, linears.get(at)) for at, each in enumerate(weights)])
        self.layers, self.how = rounded, self.how.replace("tokens", "tokens, linears in E4M3")

    def _of_layers(
        self, hidden: "torch.Tensor", positions: "torch.Tensor", starts: "torch.Tensor"
    ) -> list[dict[str, Any]]:
        """Return what the attention of each layer takes: a bias, or turns of each token and a window."""
        if self.bias is not None:
            blocks = self.blocks(starts, len(hidden)) if hidden.is_cuda else None
            return [{"bias": self.bias, "blocks": blocks} for _ in self.layers]
        if self.turns is None:
            return [{}] * len(self.layers)
        turns = {kind: self.turns(hidden, positions, kind) for kind in {*self.kinds}}
        windows = {"sliding_attention": self.window}
        return [{"turns": turns[kind], "window": windows.get(kind)} for kind in self.kinds]

    @staticmethod
    def feed(packing: Packing) -> list[Int32]:
        """Return what is fed for each launch."""
        return packing.launches

    def bind(self, packing: Packing, shape: tuple[int, int] | None) -> TorchRun:
        """Return launches of one size; answers of tokens by row where all rows have one shape."""
        import torch

        def forward(packed: torch.Tensor) -> torch.Tensor:
            answers = self.forward(packed, tokens=packing.tokens, longest=packing.longest)
            if self.of_tokens and shape:
                answers = answers[: math.prod(shape)].view(*shape, -1)
            return answers

        return TorchRun(forward, {"packed": torch.from_numpy(packing.launches[0]).cuda()}, "")

    def _embedded(
        self, ids: "torch.Tensor", positions: "torch.Tensor", types: "torch.Tensor"
    ) -> "torch.Tensor":
        more = {TYPES: types} if hasattr(self.embeddings, "token_type_embeddings") else {}
        more |= {} if self.kinds else {"position_ids": positions}
        states = self.embeddings(input_ids=ids, **more)
        return states if self.project is None else self.project(states)  # type: ignore[no-any-return]

    def _reduced(self, hidden: "torch.Tensor", starts: "torch.Tensor") -> "torch.Tensor":
        import torch

        count = len(starts) - 1
        if self.pooling == "mean":
            places = torch.arange(len(hidden), device=hidden.device, dtype=starts.dtype)
            rows = torch.searchsorted(starts[1:].contiguous(), places, right=True)
            sums = torch.zeros(count + 1, hidden.shape[1], device=hidden.device)
            sums = sums.index_add(0, rows, hidden.float())[:count]  # the last one is of what is not used
            return (sums / (starts[1:] - starts[:-1]).clamp(min=1)[:, None]).to(hidden.dtype)
        index = starts[1:] - 1 if self.pooling == "last" else starts[:-1]
        return hidden[index.clamp(0, len(hidden) - 1)]


def packed_layer(  # noqa: PLR0913, PLR0917  (torch.compile takes tensors, and guards on all else)
    hidden: "torch.Tensor",
    starts: "torch.Tensor",
    longest: int,
    heads: int,
    eps: float,
    activation: Callable[..., Any],
    *weights: Any,  # tensors, and `Scaled` ones
    turns: "tuple[torch.Tensor, torch.Tensor] | None" = None,
    window: int | None = None,
    bias: "torch.Tensor | None" = None,
    blocks: Any = None,
    seen: "list[torch.Tensor] | None" = None,
) -> "torch.Tensor":
    """Compute an encoder layer on packed tokens [tokens, hidden]; q, k and v are one product.

    Norms follow the sums, and scores have a `bias` added, if there is one. With `turns`, cosine and sine
    [tokens, head size], it is a ModernBERT layer. `seen` gets the largest input of each linear.
    """
    from torch.nn.functional import layer_norm

    linear = partial(_linear, seen)
    qkv, qkv_bias, out, out_bias, norm, norm_bias, up, up_bias, down, down_bias, last, last_bias = weights
    tokens, width = hidden.shape
    normed = layer_norm(hidden, (width,), norm, norm_bias, eps) if turns and norm is not None else hidden
    q, k, v = linear(normed, qkv, qkv_bias).view(tokens, 3, heads, width // heads).unbind(1)
    q, k = (_turn(each, *turns) for each in (q, k)) if turns else (q, k)
    context = packed_attention(q, k, v, starts, longest, window, bias=bias, blocks=blocks)
    hidden = hidden + linear(context.reshape(tokens, width), out, out_bias)
    if turns:
        one, gate = linear(layer_norm(hidden, (width,), last, last_bias, eps), up, up_bias).chunk(2, dim=-1)
        return hidden + linear(activation(one) * gate, down, down_bias)
    hidden = layer_norm(hidden, (width,), norm, norm_bias, eps)
    inner = activation(linear(hidden, up, up_bias))
    return layer_norm(hidden + linear(inner, down, down_bias), (width,), last, last_bias, eps)


def _turns(
    rotary: Any, hidden: "torch.Tensor", positions: "torch.Tensor", kind: str
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return cosine and sine [tokens, head size] of a kind of layer, without a GEMM in FP32."""
    import torch

    angles = positions[:, None].float() * getattr(rotary, f"{kind}_inv_freq").float()
    angles, scale = torch.cat((angles, angles), dim=-1), getattr(rotary, f"{kind}_attention_scaling")
    return (angles.cos() * scale).to(hidden.dtype), (angles.sin() * scale).to(hidden.dtype)


def _turn(x: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor") -> "torch.Tensor":
    """Rotate channels d and d + D / 2 of heads [tokens, heads, D], as transformers does: in FP32."""
    import torch

    one, other = x.float().chunk(2, dim=-1)
    crossed = torch.cat((-other, one), dim=-1)
    return (x.float() * cos[:, None] + crossed * sin[:, None]).to(x.dtype)


def _linear(
    seen: "list[torch.Tensor] | None", x: "torch.Tensor", weight: "torch.Tensor | Scaled", bias: Any
) -> "torch.Tensor":
    import torch

    if seen is not None:
        seen.append(x.abs().amax().float())
    if isinstance(weight, torch.Tensor):
        return torch.nn.functional.linear(x, weight, bias)
    codes = _codes_of(x, weight.input_scale)
    scales, form = (weight.input_scale, weight.scale), {"out_dtype": x.dtype, "use_fast_accum": x.is_cuda}
    return torch._scaled_mm(codes, weight.codes.t(), *scales, bias=bias, **form)  # type: ignore[arg-type]


LINEARS = 0, 2, 6, 8  # places of their weights


def _codes_of(x: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
    import torch

    return (x.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)


def _round(weight: "torch.Tensor", largest: "torch.Tensor | None") -> "torch.Tensor | Scaled":
    """Return a weight in E4M3 with the scale of its linear's inputs; what is no weight of one stays."""
    if largest is None:
        return weight
    scale = weight.abs().amax().float() / LARGEST_FP8
    return Scaled(_codes_of(weight, scale), scale, largest / LARGEST_FP8)


def packed_attention(  # noqa: PLR0913, PLR0917
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    starts: "torch.Tensor",
    longest: int,
    window: int | None = None,
    *,
    bias: "torch.Tensor | None" = None,
    blocks: Any = None,
) -> "torch.Tensor":
    """Compute softmax(q k) v [tokens, heads, size] of each row alone; on a CPU row by row, for tests.

    With a `window` a query sees the keys up to so many tokens to each side. A `bias` is [heads, 2 span - 1],
    by distance; flex attention adds it, with the `blocks` of keys that queries see.
    """
    import torch

    span = 0 if bias is None else bias.shape[1] // 2 + 1
    if bias is not None and blocks is not None:
        from torch.nn.attention.flex_attention import flex_attention

        def add(score: Any, _: Any, head: Any, i: Any, j: Any) -> Any:
            return score + bias[head, (j - i).clamp(1 - span, span - 1) + span - 1]

        q, k, v = (each[None].transpose(1, 2) for each in (query, key, value))
        context = flex_attention(q, k, v, score_mod=add, block_mask=blocks)
        return context[0].transpose(0, 1)
    if query.is_cuda and bias is None:
        from torch.nn.attention.varlen import varlen_attn

        sides: dict[str, Any] = {} if window is None else {"window_size": (window, window)}
        return cast("torch.Tensor", varlen_attn(query, key, value, starts, starts, longest, longest, **sides))
    context = torch.zeros_like(query)
    for begin, end in pairwise(starts.tolist()):
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in (query, key, value))
        place = torch.arange(end - begin, device=query.device)
        distance = place - place[:, None]
        added = None if bias is None else bias[:, distance + span - 1]
        near = added if window is None else distance.abs() <= window
        context[begin:end] = torch.nn.functional.scaled_dot_product_attention(q, k, v, near).transpose(0, 1)
    return context


def _bias_of(encoder: Any, span: int) -> "torch.Tensor":
    """Return MPNet's bias [heads, 2 span - 1] by the distance from query to key."""
    import torch

    table = encoder.relative_attention_bias.weight
    distances = torch.arange(1 - span, span, device=table.device)
    buckets = encoder.relative_position_bucket(distances, num_buckets=len(table))
    return cast("torch.Tensor", table[buckets].detach().T.contiguous())


def _find_blocks(starts: "torch.Tensor", tokens: int) -> Any:
    """Return the blocks of keys that queries see: those of their own row."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    places = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
    rows = torch.searchsorted(starts[1:].contiguous(), places, right=True)

    def own(_: Any, __: Any, i: Any, j: Any) -> Any:
        return rows[i] == rows[j]

    return create_block_mask(own, None, None, tokens, tokens, device=str(starts.device))


def _layer_weights(model: "PreTrainedModel", layer: str) -> "list[torch.Tensor | None]":
    import torch

    paths = {role: path for path, role in family_of(model.config).linears.items()}
    linears: dict[str, Any] = {role: model.get_submodule(f"{layer}.{path}") for role, path in paths.items()}
    merged = linears.get(", ".join(QKV[:3]))
    qkv = [merged] if merged is not None else [linears[role] for role in QKV[:3]]
    tensors: list[Any] = [torch.cat([linear.weight for linear in qkv])]
    tensors.append(None if qkv[0].bias is None else torch.cat([linear.bias for linear in qkv]))
    attention, ffn = (model.get_submodule(f"{layer}.{path}") for path in family_of(model.config).norms)
    for module in (linears["output"], attention, linears["ffn-in"], linears["ffn-out"], ffn):
        tensors += [getattr(module, name, None) for name in ("weight", "bias")]
    return [tensor if tensor is None else tensor.detach() for tensor in tensors]
