"""Describe a family from the data flow in one forward pass of one of its models.

Names do not say what a linear does. The data flow does: q and k meet in a product that feeds a softmax.
"""

import copy
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from qdqbench.quantize.models.attention import ATTENTION, _register_attention
from qdqbench.quantize.models.families.family import QKV, Family, Norm, Residual, Role
from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import quiet

Kind = Literal["input", "linear", "convolution", "norm", "embedding", "softmax", "product", "own weights"]
BY_HAND = (
    "copy a recipe of `recipes new` for another type and write model.layout by hand, or give another model"
)
LENGTH = 16  # tokens of the samples that are sent through
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
    steps: list[FlowStep] = field(default_factory=list)
    sums: list[FlowSum] = field(default_factory=list)
    replaceable: set[str] = field(default_factory=set)  # modules that call transformers' AttentionInterface
    tuples: set[str] = field(default_factory=set)  # modules that return one
    outputs: frozenset[int] = frozenset()  # steps that the logits come from

    def of(self, kind: Kind) -> list[FlowStep]:
        return [step for step in self.steps if step.kind == kind]

    def linears(self, numbers: frozenset[int]) -> list[FlowStep]:
        return [self.steps[number] for number in sorted(numbers) if self.steps[number].kind == "linear"]

    def readers(self, number: int) -> list[FlowStep]:
        return [step for step in self.steps if any(number in read for read in step.reads)]


def trace_flow(model: PreTrainedModel) -> Flow:
    """Record what two random samples, one of them padded, do in a model with transformers' eager attention.

    It keeps the attention that can be quantized, and wider weights. A UserError where it is no encoder that
    can be served as it is; what the model raises is raised.
    """
    name = model.config.model_type
    tokens, mask, _ = BERT.inputs
    taken = inspect.signature(model.forward).parameters
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 5 + 5
    given = {each: torch.zeros_like(ids) for each in BERT.inputs if each in taken} | {tokens: ids}
    if mask in given:
        given[mask] = torch.ones_like(ids)
        given[mask][1, LENGTH // 2 :] = 0
    recorder = _Recorder(model)
    for each, value in given.items():
        recorder.add("input", each, (), value)
    with torch.no_grad():
        expected = model(**given)[0]
        after = dict(model.named_modules())
        if replaced := [each for each, made in recorder.modules.items() if after.get(each) is not made]:
            raise UserError(
                f"a {name!r} of this configuration replaces its own modules when it reads a text "
                f"({', '.join(replaced[:2])}), so an answer depends on the texts before it. Choose one form "
                'in its config.json, such as "attention_type": "original_full" of BigBird'
            )
        # whether the last hidden state of a token depends on the token before it, and on the one behind it
        sample = {each: given[each][:1] for each in (tokens, mask) if each in given}
        changes = torch.eye(LENGTH, dtype=torch.long)[1:3]
        one, first, second = (
            model.base_model(**(sample | {tokens: sample[tokens] + change}))[0][0]
            for change in (torch.zeros_like(changes[0]), *changes)
        )
        if torch.equal(one[1], second[1]):
            if torch.equal(one[2], first[2]):
                raise UserError(
                    f"no token of a {name!r} sees another one, at least on a CPU; give another model"
                )
            raise UserError(
                f"a {name!r} is a decoder, as no token sees those after it; only encoders are supported"
            )
        with recorder.watching():
            output = model(**given)[0]
    recorder.flow.outputs = recorder.sources(output)
    if not torch.allclose(expected, output, atol=1e-5):
        raise UserError(
            f"a {name!r} gives other logits with the attention and the mask that are used here; {BY_HAND}"
        )
    if mask in given and not _answers_padded_alike(model, given):
        raise UserError(
            f"a {name!r} gives a text other logits when it is padded, so what a batch answers depends on its "
            "longest text; give another model"
        )
    return recorder.flow


def _answers_padded_alike(model: PreTrainedModel, given: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the padded sample has the logits that it has alone; widens the model's weights.

    Of random weights as they are, what a convolution reads of padding is near rounding.
    """
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10 if weight.dim() > 1 else 1)
        both, alone = (
            model(**each)[0]
            for each in (given, {name: value[1:, : LENGTH // 2] for name, value in given.items()})
        )
    apart = (both[1:, : alone.shape[1]] - alone).abs().max()
    return not apart > 1e-3 * alone.abs().max()


class _Recorder(TorchFunctionMode):
    """State of one pass: where every tensor so far comes from."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.flow, self.model = Flow(), model
        self.modules = dict(model.named_modules())
        self.names = {id(module): name for name, module in self.modules.items()}
        self.weights = {id(value) for value in model.parameters()}
        self.inside: list[str] = []  # modules whose forward runs now
        self.known: dict[int, tuple[Any, frozenset[int]]] = {}  # tensors are held, so that no id comes again

    def sources(self, value: Any) -> frozenset[int]:
        found = (self.known[id(tensor)][1] for tensor in _tensors(value) if id(tensor) in self.known)
        return frozenset().union(*found)

    def mark(self, value: Any, sources: frozenset[int]) -> None:
        for tensor in _tensors(value):
            self.known[id(tensor)] = (tensor, sources)

    def add(self, kind: Kind, module: str, operands: tuple[Any, ...], output: Any) -> None:
        reads = tuple(self.sources(value) for value in operands) or (frozenset(),)
        width = int(operands[0].shape[-1]) if operands and operands[0].dim() else 0
        step = FlowStep(len(self.flow.steps), kind, module, reads, width)
        self.flow.steps.append(step)
        self.mark(output, frozenset([step.number]))

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._register_attention()
        self.model.config._attn_implementation = RECORDED
        # on each module: torch 2.13 never forgets a global hook `with_kwargs`, and compiled modules warn
        with ExitStack() as hooks, self:
            for module in self.modules.values():
                hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                hooks.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            yield

    def _register_attention(self) -> None:
        """Register the attention that can be quantized, and record which modules call it with what."""
        _register_attention()
        own: Any = AttentionInterface
        own_mask: Any = AttentionMaskInterface
        attention = own()[ATTENTION]

        def recorded(module: nn.Module, query: Any, key: Any, *args: Any, **given: Any) -> Any:
            if key.shape[1] != query.shape[1]:
                heads = f"{query.shape[1]} and {key.shape[1]}"
                raise UserError(
                    f"a {self.model.config.model_type!r} of this configuration has more heads of queries "
                    f"than of keys ({heads}), as no kernel here does; give another encoder"
                )
            self.flow.replaceable.add(self.names[id(module)])
            return attention(module, query, key, *args, **given)

        AttentionInterface.register(RECORDED, recorded)
        AttentionMaskInterface.register(RECORDED, own_mask()[ATTENTION])

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.inside.append(self.names[id(module)])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = self.inside.pop()
        operands = (*args, *kwargs.values())
        if isinstance(output, tuple):
            self.flow.tuples.add(name)
        if (kind := module_kind(module)) and output is not None:
            self.add(kind, name, tuple(_tensors(operands[:1])), output)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        name, module = getattr(function, "__name__", ""), self.inside[-1] if self.inside else ""
        operands = tuple(_tensors((args, kwargs)))
        before = self.sources(operands)
        if self.inside and module_kind(self.modules[module]):  # its hook says what it made
            self.mark(output, before)
        elif name in PRODUCTS and len(operands) > 1:
            own = any(id(value) in self.weights for value in operands)
            self.add("own weights" if own else "product", module, operands, output)
        elif name == "softmax":
            self.add("softmax", module, operands[:1], output)
        elif before:
            if name in SUMS and len(operands) == 2 and operands[0].shape == operands[1].shape:
                one, two = operands
                self.flow.sums.append(FlowSum(module, (self.sources(one), self.sources(two))))
            self.mark(output, before)
        return output


PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "__matmul__", "linear", "mm")
SUMS = ("add", "add_", "__add__", "__iadd__", "__radd__")


def module_kind(module: nn.Module) -> Kind | None:
    """Return what a module of torch's computes with its weights; None for any other."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.modules.conv._ConvNd) or type(module).__name__ == "Conv1D":
        return "convolution"
    if isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm"):
        return None if [*module.children()] else "norm"
    return None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def find_config_fields(model: PreTrainedModel, layer: str, first: str, wide: int) -> dict[str, Any]:
    """Return the config fields of a `Family`, where `first`, of a feed-forward, has `wide` outputs."""
    given = model.config.to_dict()
    before = _bare(model, layer)
    names = (n for n, value in given.items() if isinstance(value, str) and value in ACT2FN)
    others = ((n, "relu" if given[n] != "relu" else "silu") for n in names)
    changed = ((n, _bare(_rebuilt(model, n, other), layer)) for n, other in others)
    activation = next((n for n, after in changed if after and after != before), None)
    sizes = [n for n, value in given.items() if type(value) is int and value in (wide, wide // 2)]
    doubled = ((n, _rebuilt(model, n, 2 * given[n])) for n in sizes)
    widths = (n for n, other in doubled if other and other.get_submodule(first).out_features == 2 * wide)
    found = {"activation": activation, "intermediate": next(widths, None)}
    if lost := [what for what, name in found.items() if name is None]:
        raise UserError(
            f"the configuration of a {model.config.model_type!r} has no field for {' and '.join(lost)} of "
            f"its feed-forward; {BY_HAND}"
        )
    numbers = (n for n, value in given.items() if value is None or type(value) in (int, float))
    return {**found, "dropouts": tuple(n for n in numbers if "drop" in n)}


def _rebuilt(model: PreTrainedModel, name: str, value: Any) -> PreTrainedModel | None:
    """Return the model with another value of a field; None where there is no such model."""
    config = copy.deepcopy(model.config)
    try:
        setattr(config, name, value)
        with torch.device("meta"):
            return type(model)(config)
    except Exception:  # whatever a configuration that makes no sense raises
        return None


def _bare(model: Any, layer: str) -> list[str]:
    """Return the classes of the modules of a layer that have no weights, its activation among them."""
    inner = model.get_submodule(layer).modules() if model is not None else ()
    return [type(module).__name__ for module in inner if next(module.parameters(), None) is None]


@dataclass(frozen=True)
class Frame:
    """A model taken apart into its layers and what is around them."""

    layers: str  # full name, * for numbers
    prefix: str  # of the base model, with a dot
    modules: Mapping[str, Any]
    flow: Flow

    def path(self, name: str) -> tuple[str, str] | None:
        """Return the layer and path inside of it; None outside of the layers."""
        pattern = re.escape(self.layers).replace(r"\*", r"\d+")
        found = re.match(rf"({pattern}\.\d+)(?:\.(.+))?$", name)
        return (found[1], found[2] or "") if found else None

    def pattern(self, name: str) -> str:
        """Return a module's name with * for the number of its layer."""
        place = self.path(name)
        return f"{self.layers}.*.{place[1]}" if place else name

    def linears(self) -> list[str]:
        return [name for name, module in self.modules.items() if isinstance(module, nn.Linear)]


def find_layer_list(attentions: Collection[str], modules: Mapping[str, Any], name: str) -> str:
    """Return the full name of the list whose elements hold an attention each; * stands for a number."""
    places: set[tuple[str, int]] = set()  # innermost list with the attention inside of an element, and which
    for attention in attentions:
        parts = attention.split(".")
        around = ((".".join(parts[:end]), parts[end]) for end in range(len(parts) - 2, 0, -1))
        inside = ((p, n) for p, n in around if isinstance(modules[p], nn.ModuleList) and n.isdecimal())
        if (place := next(inside, None)) is None:
            raise UserError(
                f"the layers of a {name!r} are no one list (its attention is {attention}); {BY_HAND}"
            )
        places.add((place[0], int(place[1])))
    patterns = {mask_numbers(path) for path, _ in places}
    if len(patterns) > 1 or len({number for _, number in places}) < len(places):
        lists = ", ".join(sorted({path for path, _ in places}))
        raise UserError(
            f"the layers of a {name!r} stand in several lists ({lists}), so that a number does not say which "
            f"one is meant; {BY_HAND}"
        )
    return patterns.pop()


def mask_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


SECOND = "a feed-forward alongside the widest, or last, of its layer"
STRANGE = "by what it reads it belongs to neither attention nor feed-forward"


@dataclass
class DetectedRoles:
    """Roles of single modules by full name, as the data flow shows them."""

    roles: dict[str, set[Role]] = field(default_factory=lambda: defaultdict(set))
    attentions: dict[str, int] = field(default_factory=dict)  # and head size
    products: set[str] = field(default_factory=set)  # modules whose products are those of an attention
    seconds: set[str] = field(default_factory=set)  # linears of feed-forwards alongside the one of a layer

    def give(self, steps: Iterable[FlowStep], role: Role) -> None:
        for step in steps:
            self.roles[step.module].add(role)


def find_attention_roles(flow: Flow) -> DetectedRoles:
    """Find the linears around each softmax: those of its scores, its values and its result."""
    found = DetectedRoles()
    for softmax in flow.of("softmax"):
        scores = (step for step in flow.of("product") if step.number in softmax.reads[0])
        for score in scores:
            queries, keys = (flow.linears(read) for read in score.reads[:2])
            if not (queries and keys) or queries[-1].reads != keys[-1].reads:
                continue  # a product with positions
            products = (step for step in flow.readers(softmax.number) if step.kind == "product")
            weighed = (
                (p, [s for r in p.reads if softmax.number not in r for s in flow.linears(r)])
                for p in products
            )
            context, values = next((each for each in weighed if each[1]), (None, []))
            if context is None:
                continue
            one = queries == keys == values
            for role, steps in zip(QKV[:3], (queries, keys, values), strict=True):
                found.give(steps, QKV[-1] if one else role)
            found.give((s for s in flow.readers(context.number) if s.kind == "linear"), "output")
            found.attentions[softmax.module] = score.width
            found.products |= {score.module, context.module}
    return found


def add_feed_forward_roles(frame: Frame, found: DetectedRoles) -> None:
    """Add of each layer the widest linear that reads nothing but linears' output, and these linears."""
    pairs: dict[str, list[tuple[int, FlowStep, list[FlowStep]]]] = defaultdict(list)
    for step in frame.flow.of("linear"):
        place = frame.path(step.module)
        first = frame.flow.linears(step.reads[0])
        same = [s for s in first if (at := frame.path(s.module)) and place and at[0] == place[0]]
        free = not found.roles[step.module] and not any(found.roles[s.module] for s in first)
        if place and free and len(same) == len(step.reads[0]) > 0:
            pairs[place[0]].append((step.width, step, same))
    for several in pairs.values():
        chosen = max(several, key=lambda pair: (pair[0], pair[1].number))
        for pair in several:
            if pair == chosen:
                found.give([pair[1]], "ffn-out")
                found.give(pair[2], "ffn-in")
            else:
                found.seconds |= {step.module for step in (pair[1], *pair[2])}


def find_other_products(
    flow: Flow, found: DetectedRoles, named: Callable[[str], str] = mask_numbers
) -> dict[str, str]:
    """Find products of matrices that are neither linears nor of a recognized attention."""
    left = {}
    for step in flow.steps:
        if step.kind == "convolution":
            left[step.module] = "a convolution; only linears become INT8"
        elif step.kind == "own weights":
            left[step.module] = "it multiplies by weights of its own; only linears become INT8"
        elif step.kind == "product" and step.module not in found.products:
            left[step.module] = "a product of two activations outside of an attention"
    return {named(name): why for name, why in left.items()}


def _join_reasons(left: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in [*left.items()][:4])


def find_inner_roles(frame: Frame, found: DetectedRoles) -> tuple[dict[str, Role], dict[str, str]]:
    """Return the role of each linear of a layer by its path; reasons for those that have none."""
    ran = {step.module for step in frame.flow.steps}
    roles: dict[str, set[Role]] = defaultdict(set)
    running: dict[str, str] = {}
    for name in frame.linears():
        if place := frame.path(name):
            roles[place[1]] |= found.roles[name]
            if name in ran:
                running[place[1]] = SECOND if name in found.seconds else STRANGE
    linears, left = dict[str, Role](), dict[str, str]()
    for path, several in roles.items():
        linears[path] = next(iter(several)) if len(several) == 1 else "other"
        if len(several) > 1:
            left[path] = f"it is {' and '.join(sorted(several))} at once"
        elif not several:
            left[path] = running.get(path, "it did not run on a sample")
    return linears, {f"{frame.layers}.*.{path}": why for path, why in left.items()}


def find_outer_roles(frame: Frame) -> tuple[dict[str, Role], dict[str, str]]:
    """Return the role of each linear before and behind the layers; reasons for those that have none."""
    ran = [step.module for step in frame.flow.of("linear")]
    places = [at for at, name in enumerate(ran) if frame.path(name)]
    roles, left = dict[str, Role](), dict[str, str]()
    for name in frame.linears():
        if frame.path(name):
            continue
        short = name.removeprefix(frame.prefix)
        if name not in ran:
            roles[short], left[name] = "other", "it did not run on a sample"
        elif places[0] < ran.index(name) < places[-1]:
            roles[short], left[name] = "other", "it runs between layers"
        elif ran.index(name) < places[0]:
            roles[short] = "embeddings"
        else:
            roles[short] = "classifier" if name == ran[-1] else "pooler"
    return roles, left


def can_replace_attention(frame: Frame, found: DetectedRoles) -> bool:
    """Return whether every attention can get INT8 q, k, v and softmax.

    One that rotates q and k (it adds two parts of the same query) cannot here: which channels are a pair is
    not known, and smoothing must not part them.
    """
    for each in frame.flow.sums:
        one, two = ({s.module for s in frame.flow.linears(part)} for part in each.parts)
        if any(found.roles[name] & {"query", QKV[-1]} for name in one & two):
            return False
    return set(found.attentions) == frame.flow.replaceable


def find_residuals(frame: Frame, found: DetectedRoles) -> Iterator[Residual]:
    """Find what is added after attention and feed-forward, where a quantizer has a place for it."""
    wanted: dict[Role, tuple[Role, ...]] = {"output": QKV, "ffn-out": ("ffn-in",)}
    for role, readers in wanted.items():
        added = [  # a tensor that one linear of this role made, and the residual
            (each, residual)
            for each in reversed(frame.flow.sums)
            for part, residual in (each.parts, each.parts[::-1])
            if len(part) == len(steps := frame.flow.linears(part)) == 1
            and found.roles[steps[0].module] == {role}
        ]
        if not added:
            continue
        last, residual = added[0]  # of the last layer: a first one may differ
        reading = (s.module for s in frame.flow.of("linear") if s.reads[0] == residual)
        roles = {each for name in reading for each in found.roles[name]}
        taken = inspect.signature(frame.modules[last.module].forward).parameters
        place = frame.path(last.module)
        if place and len(taken) == 2 and roles & set(readers):
            yield Residual(place[1], tuple(each for each in readers if each in roles))


def find_norms(frame: Frame, found: DetectedRoles) -> dict[str, Norm]:
    named: dict[str, Norm] = {}
    for step in frame.flow.of("norm"):
        if (place := frame.path(step.module)) is None or not step.reads:
            continue
        before = _roles(frame, found, frame.flow.linears(step.reads[0]), place[0])
        after = frame.flow.readers(step.number)
        behind = _roles(frame, found, (s for s in after if s.kind == "linear"), place[0])
        goes_on = any(s.kind == "norm" for s in after) or step.number in frame.flow.outputs
        if "ffn-out" in before:
            if not any(s.module.startswith(f"{place[0]}.") for s in after):
                named[place[1]] = "ffn"
        elif "output" in before and "ffn-in" in behind:
            named[place[1]] = "attention" if goes_on else "ffn input"
        elif "output" not in before and behind & set(QKV):
            named[place[1]] = "attention input"
    return named


def _roles(frame: Frame, found: DetectedRoles, steps: Iterable[FlowStep], layer: str) -> set[Role]:
    inside = (step for step in steps if (at := frame.path(step.module)) and at[0] == layer)
    return {role for step in inside for role in found.roles[step.module]}


def find_embeddings(frame: Frame, model: PreTrainedModel) -> dict[str, Any]:
    """Return of the base model what makes vectors of tokens, its last LayerNorm, and a linear behind it."""
    words = next(name for name, module in frame.modules.items() if module is model.get_input_embeddings())
    embeddings = words.removeprefix(frame.prefix).partition(".")[0]
    around = f"{frame.prefix}{embeddings}."
    norms = [step.module for step in frame.flow.of("norm") if step.module.startswith(around)]
    first = next(step.number for step in frame.flow.steps if frame.path(step.module))
    before = [step for step in frame.flow.steps[:first] if step.kind in {"linear", "norm"}]
    linears = [step.module for step in before[-1:] if step.kind == "linear"]
    return {
        "embeddings": embeddings,
        "embeddings_norm": norms[-1].removeprefix(frame.prefix) if norms else "",
        "embeddings_linear": linears[0].removeprefix(frame.prefix) if linears else None,
    }


def find_inputs(frame: Frame) -> tuple[str, ...]:
    """Return the inputs with information: not those of an embedding with a single row."""
    single = [s.reads[0] for s in frame.flow.of("embedding") if frame.modules[s.module].num_embeddings == 1]
    read = frozenset[int]().union(*(r for step in frame.flow.steps for r in step.reads if r not in single))
    return tuple(step.module for step in frame.flow.of("input") if step.number in read)


def positions_follow_padding(frame: Frame, model: PreTrainedModel) -> bool:
    words, tokens = model.get_input_embeddings(), frozenset([0])
    return any(
        step.reads[0] == tokens and frame.modules[step.module] is not words
        for step in frame.flow.of("embedding")
    )


@dataclass(frozen=True)
class Recognized:
    """A family described, and what of its models multiplies matrices and is not in it."""

    family: Family
    left: dict[str, str]  # module, as rules name it: why it stays in FP16 or FP32; numbers of layers are *
    gated: bool  # the feed-forward multiplies two halves, or what two linears made
    head_size: int
    attention: str  # inside a layer, also where it cannot be exchanged


def detect_layout(model: PreTrainedModel) -> Recognized:
    """Describe the family of a model that is on the CPU, with weights of its own or random ones."""
    name = model.config.model_type
    try:
        with quiet("transformers"):
            flow = trace_flow(model)
    except UserError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"a {name!r} of this configuration does not run on a sample of text ({text}); give an encoder of "
            "text of another type"
        ) from error
    found = find_attention_roles(flow)
    if not found.attentions:
        strange = _join_reasons(find_other_products(flow, found))
        raise UserError(
            f"no attention was recognized in a {name!r}, as no product of what two linears made goes through "
            f"a softmax to meet what a third made{f' ({strange})' if strange else ''}. Give another model"
        )
    plain: Any = MODEL_MAPPING.get(type(model.config), None)
    if model.base_model is not model and plain is type(model):
        raise UserError(
            f"a {name!r} keeps its encoder in {model.base_model_prefix!r}, of class "
            f"{type(model.base_model).__name__}; save that encoder, and give its folder"
        )
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    frame = Frame(find_layer_list(found.attentions, modules, name), prefix, modules, flow)
    add_feed_forward_roles(frame, found)
    linears, left = find_inner_roles(frame, found)
    runs = Counter(step.module for step in flow.of("linear"))
    outputs = (n for n in runs if (at := frame.path(n)) and linears.get(at[1]) == "output")
    if shared := next((n for n in outputs if runs[n] > 1), None):
        raise UserError(f"the layers of a {name!r} share weights: {shared} runs several times; {BY_HAND}")
    has = {part for role in linears.values() for part in role.split(", ")}
    needed = ("query", "key", "value", "output", "ffn-in", "ffn-out")
    if missing := [role for role in needed if role not in has]:
        raise UserError(
            f"no linears of a {name!r} were recognized as {', '.join(missing)}: "
            f"{_join_reasons(left) or 'it has none in its layers'}; {BY_HAND}"
        )
    attention, size = [*found.attentions.items()][-1]
    layer, path = frame.path(attention) or ("", "")
    paths = {role: f"{layer}.{place}" for place, role in linears.items()}
    wide, read = modules[paths["ffn-in"]].out_features, modules[paths["ffn-out"]].in_features
    outside, unplaced = find_outer_roles(frame)
    poolers = (name for name, role in outside.items() if role == "pooler")
    equal = [name for name, value in vars(modules[attention]).items() if type(value) is int and value == size]
    sizes = [name for name in equal if re.search("size|dim|head_d", name)]
    family = Family(
        name=name,
        model_types=(name,),
        layers=frame.layers.removeprefix(prefix),
        linears=linears,
        outside=outside,
        attention=path if can_replace_attention(frame, found) else None,
        residuals=tuple(find_residuals(frame, found)),
        norms=find_norms(frame, found),
        pooler=next((n.partition(".")[0] for n in poolers if prefix + n in modules), None),
        inputs=find_inputs(frame),
        head_size=max(sizes or [*equal, ""], key=len),
        positions_follow_padding=positions_follow_padding(frame, model),
        layers_return_tuples=layer in flow.tuples,
        **find_embeddings(frame, model),
        **find_config_fields(model, layer, paths["ffn-in"], wide),
    )
    gated = list(linears.values()).count("ffn-in") > 1 or wide != read
    left |= unplaced | find_other_products(flow, found, frame.pattern)
    short = {each.removeprefix(prefix): why for each, why in left.items()}
    return Recognized(family, short, gated, size, path)


class ModuleRow(NamedTuple):
    module: str  # * for numbers; empty: everywhere
    class_name: str
    number: int
    role: str  # empty: none that matters
    becomes: str  # INT8, FP16, or empty where nothing is computed with weights or products


def list_modules(model: PreTrainedModel, found: Recognized) -> list[ModuleRow]:
    """Return every module that computes, in model order; those without weights by class alone."""
    prefix = f"{model.base_model_prefix}."
    rows: Counter[tuple[str, str, str, str]] = Counter()
    for name, module in model.named_modules():
        class_name, place, role = type(module).__name__, found.family.place(name), ""
        pattern = f"{mask_numbers(place.layers)}.*.{place.path}" if place else name
        pattern = pattern.removeprefix(prefix)
        becomes = "FP16" if pattern in found.left else ""
        if (kind := module_kind(module)) == "linear":
            role = found.family.role(name)
            becomes = "INT8" if place and role != "other" else "FP16"
        elif kind == "norm":
            role, becomes = (found.family.norms.get(place.path, "") if place else ""), "FP16"
        elif kind or pattern in found.left:
            role, becomes = "embeddings" if kind == "embedding" else "", "FP16"
        elif place and place.path == found.attention:
            role, becomes = "attention", "FP16"
        elif [*module.children()]:
            continue
        else:
            pattern = ""
        rows[pattern, class_name, role, becomes] += 1
    return [ModuleRow(*row[:2], count, *row[2:]) for row, count in rows.items()]
