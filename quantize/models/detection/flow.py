"""Where the tensors of a model go: which module read what another one made, seen in one forward pass.

Names do not say what a linear does; which tensors meet in a product whose result goes through a softmax does.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.quantize.models.attention import ATTENTION, _register_attention
from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.utils.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

Kind = Literal["input", "linear", "convolution", "norm", "embedding", "softmax", "product", "own weights"]
LENGTH = 8  # tokens of the samples that are sent through
RECORDED = "qdq_recorded"  # name of the attention with transformers


@dataclass(frozen=True)
class FlowStep:
    """Something that makes a new tensor; all else only moves, scales or adds what it is given."""

    number: int
    kind: Kind
    module: str
    reads: tuple[frozenset[int], ...] = ()  # steps that each operand comes from
    width: int = 0  # last dimension of the first operand


@dataclass(frozen=True)
class FlowSum:
    """Two tensors of equal shape that were added."""

    module: str  # in which this happened
    parts: tuple[frozenset[int], frozenset[int]]  # steps that each comes from


@dataclass
class Flow:
    """What one forward pass did."""

    steps: list[FlowStep] = field(default_factory=list)
    sums: list[FlowSum] = field(default_factory=list)
    replaceable: set[str] = field(default_factory=set)  # modules that call transformers' AttentionInterface
    tuples: set[str] = field(default_factory=set)  # modules that return one
    outputs: frozenset[int] = frozenset()  # steps that the logits come from
    inputs: tuple[str, ...] = ()  # that the model was given
    ahead: bool = True  # tokens see those behind them
    same: bool = True  # the attention that can be quantized gives the same logits as the model's own

    def of(self, kind: Kind) -> list[FlowStep]:
        """Steps of a kind, in order."""
        return [step for step in self.steps if step.kind == kind]

    def behind(self, numbers: frozenset[int], *kinds: Kind) -> list[FlowStep]:
        """Steps of some kinds among these."""
        return [self.steps[number] for number in sorted(numbers) if self.steps[number].kind in kinds]

    def readers(self, number: int) -> list[FlowStep]:
        """Steps that read what a step made."""
        return [step for step in self.steps if any(number in read for read in step.reads)]


def list_inputs(model: "PreTrainedModel") -> tuple[str, ...]:
    """Return the arrays of a sample that a model's `forward` takes."""
    known = inspect.signature(model.forward).parameters
    return tuple(name for name in BERT.inputs if name in known)


def trace_flow(model: "PreTrainedModel") -> Flow:
    """Send two random samples through a model, one of them padded, and write down what happens.

    Args:
        model: with transformers' eager attention; given the attention that can be quantized for good.

    Raises:
        Exception: whatever the model raises on them.
    """
    import torch

    given = _samples(model)
    with torch.no_grad():
        expected = model(**given)[0]
    recorder = _Recorder(model)
    recorder.flow.inputs = tuple(given)
    recorder.flow.ahead = _attends_ahead(model)
    for name, value in given.items():
        recorder.made("input", name, (), value)
    with torch.no_grad(), recorder.watching():
        made = model(**given)[0]
    recorder.flow.outputs = recorder.sources(made)
    recorder.flow.same = bool(torch.allclose(expected, made, atol=1e-5))
    return recorder.flow


def _samples(model: "PreTrainedModel") -> "dict[str, torch.Tensor]":
    import torch

    names = list_inputs(model)
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 5 + 5
    given = {name: torch.zeros_like(ids) for name in names} | {names[0]: ids}
    if (mask := BERT.inputs[1]) in given:
        given[mask] = torch.ones_like(ids)
        given[mask][1, LENGTH // 2 :] = 0
    return given


def _attends_ahead(model: "PreTrainedModel") -> bool:
    """Return whether the first token's last hidden state depends on the last token."""
    import torch

    given = {name: value[:1] for name, value in _samples(model).items() if name in BERT.inputs[:2]}
    other = given | {BERT.inputs[0]: given[BERT.inputs[0]].clone()}
    other[BERT.inputs[0]][0, -1] += 1
    with torch.no_grad():
        one, two = (model.base_model(**tokens)[0][0, 0] for tokens in (given, other))
    return not torch.equal(one, two)


class _Recorder:
    """State of one pass: where every tensor so far comes from."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.flow, self.model = Flow(), model
        self.modules = dict(model.named_modules())
        self.names = {id(module): name for name, module in self.modules.items()}
        self.weights = {id(value) for value in model.parameters()}
        self.inside: list[str] = []  # modules whose forward runs now
        self.known: dict[int, tuple[Any, frozenset[int]]] = {}  # tensors are held, so that no id comes again

    def sources(self, value: Any) -> frozenset[int]:
        """Steps that a tensor, or the tensors in a value, come from."""
        found = (self.known[id(tensor)][1] for tensor in _tensors(value) if id(tensor) in self.known)
        return frozenset().union(*found)

    def mark(self, value: Any, sources: frozenset[int]) -> None:
        for tensor in _tensors(value):
            self.known[id(tensor)] = (tensor, sources)

    def made(self, kind: Kind, module: str, operands: tuple[Any, ...], output: Any) -> None:
        """Add a step, and note what it made."""
        reads = tuple(self.sources(value) for value in operands)
        width = int(operands[0].shape[-1]) if operands and operands[0].dim() else 0
        reads = reads or (frozenset(),)
        step = FlowStep(len(self.flow.steps), kind, module, reads, width)
        self.flow.steps.append(step)
        self.mark(output, frozenset([step.number]))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Write down what modules and functions of torch do while the block runs."""
        from torch.overrides import TorchFunctionMode

        recorder = self

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
            ) -> Any:
                return recorder.called(function, args, kwargs or {})

        _register_recorded(self)
        self.model.config._attn_implementation = RECORDED
        # on each module: torch 2.13 never forgets a global hook `with_kwargs`, and compiled modules warn
        with ExitStack() as hooks, Mode():
            for module in self.modules.values():
                hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                hooks.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            yield

    def _enter(self, module: "nn.Module", _: Any) -> None:
        self.inside.append(self.names[id(module)])

    def _leave(self, module: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = self.inside.pop()
        operands = (*args, *kwargs.values())
        if isinstance(output, tuple):
            self.flow.tuples.add(name)
        if (kind := module_kind(module)) and output is not None:
            self.made(kind, name, tuple(_tensors(operands[:1])), output)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, and see what it made of what."""
        output = function(*args, **kwargs)
        name, module = getattr(function, "__name__", ""), self.inside[-1] if self.inside else ""
        operands = tuple(_tensors((args, kwargs)))
        before = self.sources(operands)
        leaf = self.inside and module_kind(self.modules[self.inside[-1]])
        if leaf:  # its hook says what it made
            self.mark(output, before)
        elif name in PRODUCTS and len(operands) > 1:
            own = any(id(value) in self.weights for value in operands)
            self.made("own weights" if own else "product", module, operands, output)
        elif name == "softmax":
            self.made("softmax", module, operands[:1], output)
        elif before:
            if name in SUMS and len(operands) == 2 and operands[0].shape == operands[1].shape:
                one, two = operands
                self.flow.sums.append(FlowSum(module, (self.sources(one), self.sources(two))))
            self.mark(output, before)
        return output


PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "__matmul__", "linear", "mm")
SUMS = ("add", "add_", "__add__", "__iadd__", "__radd__")


def module_kind(module: "nn.Module") -> Kind | None:
    """Return the product of a module, where it is one of torch's that compute with weights."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.modules.conv._ConvNd) or type(module).__name__ == "Conv1D":
        return "convolution"
    if isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm"):
        return None if [*module.children()] else "norm"
    return None


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)


def _register_recorded(recorder: _Recorder) -> None:
    """Register the attention that can be quantized, and record which modules call it with what."""
    from transformers import AttentionInterface, AttentionMaskInterface

    _register_attention()
    own: Any = AttentionInterface
    own_mask: Any = AttentionMaskInterface
    attention, mask = own()[ATTENTION], own_mask()[ATTENTION]

    def recorded(module: "nn.Module", query: Any, key: Any, *args: Any, **given: Any) -> Any:
        if key.shape[1] != query.shape[1]:
            raise UserError(f"it has {query.shape[1]} heads of queries and {key.shape[1]} of keys")
        recorder.flow.replaceable.add(recorder.names[id(module)])
        return attention(module, query, key, *args, **given)

    AttentionInterface.register(RECORDED, recorded)
    AttentionMaskInterface.register(RECORDED, mask)
