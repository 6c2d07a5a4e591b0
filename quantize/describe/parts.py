"""The fields of a description, from the roles of linears and the data flow between them."""

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.describe.flow import Step, Sum
from qdqbench.quantize.describe.frame import Frame
from qdqbench.quantize.describe.roles import SECOND, STRANGE, Found
from qdqbench.quantize.families.family import QKV, Norm, Residual, Role

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def inside(frame: Frame, found: Found) -> tuple[dict[str, Role], dict[str, str]]:
    """Role of each linear of a layer by its path; reasons for those that have none."""
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
        elif not several and path not in running:
            left[path] = "it did not run on a sample"
        elif not several:
            left[path] = running[path]
    return linears, {f"{frame.layers}.*.{path}": why for path, why in left.items()}


def shared(frame: Frame, linears: Mapping[str, Role]) -> str | None:
    """A linear behind an attention that runs more than once for a sample; None where there is none."""
    ran = Counter(step.module for step in frame.flow.of("linear"))
    ends = (name for name in ran if (at := frame.path(name)) and linears.get(at[1]) == "output")
    return next((name for name in ends if ran[name] > 1), None)


def outside(frame: Frame) -> tuple[dict[str, Role], dict[str, str]]:
    """Role of each linear before and behind the layers; reasons for those that have none."""
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


def replaceable(frame: Frame, found: Found) -> bool:
    """Whether every attention can get INT8 q, k, v and softmax.

    One that rotates q and k cannot here: which channels are a pair is not known, and smoothing must not part
    them.
    """
    rotated = any(_rotates(frame, found, each) for each in frame.flow.sums)
    return set(found.attentions) == frame.flow.replaceable and not rotated


def _rotates(frame: Frame, found: Found, each: Sum) -> bool:
    """Whether both parts of a sum are of the same query."""
    one, two = ({s.module for s in frame.flow.behind(part, "linear")} for part in each.parts)
    return any(found.roles[name] & {"query", QKV[-1]} for name in one & two)


def residuals(frame: Frame, found: Found) -> Iterator[Residual]:
    """What is added behind attention and feed-forward, where a quantizer has a place for it."""
    wanted: dict[Role, tuple[Role, ...]] = {"output": QKV, "ffn-out": ("ffn-in",)}
    for role, readers in wanted.items():
        added = (each for each in reversed(frame.flow.sums) if _adds_to(frame, found, each, role))
        if (last := next(added, None)) is None:  # that of the last layer: a first one may differ
            continue
        residual = last.parts[1] if _made_by(frame, found, last.parts[0], role) else last.parts[0]
        reading = (s.module for s in frame.flow.of("linear") if s.reads[0] == residual)
        roles = {each for name in reading for each in found.roles[name]}
        taken = inspect.signature(frame.modules[last.module].forward).parameters
        place = frame.path(last.module)
        if place and len(taken) == 2 and roles & set(readers):
            yield Residual(place[1], tuple(each for each in readers if each in roles))


def _adds_to(frame: Frame, found: Found, each: Sum, role: Role) -> bool:
    return any(_made_by(frame, found, part, role) for part in each.parts)


def _made_by(frame: Frame, found: Found, part: frozenset[int], role: Role) -> bool:
    """Whether a tensor is what one linear of a role made."""
    steps = frame.flow.behind(part, "linear")
    return len(part) == len(steps) == 1 and found.roles[steps[0].module] == {role}


def norms(frame: Frame, found: Found) -> dict[str, Norm]:
    """What each LayerNorm of a layer normalises."""
    named: dict[str, Norm] = {}
    for step in frame.flow.of("norm"):
        if (place := frame.path(step.module)) is None or not step.reads:
            continue
        before = _roles(frame, found, frame.flow.behind(step.reads[0], "linear"), place[0])
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


def _roles(frame: Frame, found: Found, steps: Iterable[Step], layer: str) -> set[Role]:
    inside = (step for step in steps if (at := frame.path(step.module)) and at[0] == layer)
    return {role for step in inside for role in found.roles[step.module]}


def embeddings(frame: Frame, model: "PreTrainedModel") -> str:
    """The module of the base model that makes vectors of tokens."""
    words: str = next(
        name for name, module in frame.modules.items() if module is model.get_input_embeddings()
    )
    return words.removeprefix(frame.prefix).partition(".")[0]


def embeddings_norm(frame: Frame, model: "PreTrainedModel") -> str:
    """The last LayerNorm of the embeddings; empty where they have none."""
    around = f"{frame.prefix}{embeddings(frame, model)}."
    names = [step.module for step in frame.flow.of("norm") if step.module.startswith(around)]
    return names[-1].removeprefix(frame.prefix) if names else ""


def embeddings_linear(frame: Frame) -> str | None:
    """The linear between the embeddings, their LayerNorm included, and the layers; None without one."""
    first = next(step.number for step in frame.flow.steps if frame.path(step.module))
    before = [s for s in frame.flow.steps if s.number < first and s.kind in {"linear", "norm"}]
    return before[-1].module.removeprefix(frame.prefix) if before and before[-1].kind == "linear" else None


def pooler(frame: Frame, outside: Mapping[str, Role]) -> str | None:
    """The module of the base model that makes what the classifier reads."""
    poolers = (name for name, role in outside.items() if role == "pooler")
    return next((n.partition(".")[0] for n in poolers if frame.prefix + n in frame.modules), None)


def inputs(frame: Frame) -> tuple[str, ...]:
    """Inputs that say something: not what an embedding with a single row reads."""
    single = [s.reads[0] for s in frame.flow.of("embedding") if frame.modules[s.module].num_embeddings == 1]
    read = {
        n for step in frame.flow.steps for numbers in step.reads if numbers not in single for n in numbers
    }
    return tuple(step.module for step in frame.flow.of("input") if step.number in read)


def positions_follow_padding(frame: Frame, model: "PreTrainedModel") -> bool:
    """Whether positions are counted from the tokens, past the padding."""
    words, tokens = model.get_input_embeddings(), frozenset([0])
    return any(
        step.reads[0] == tokens and frame.modules[step.module] is not words
        for step in frame.flow.of("embedding")
    )


def attribute(module: Any, size: int) -> str:
    """What an attention calls its head size; of several that are equal, the one with the longest name."""
    equal = [name for name, value in vars(module).items() if type(value) is int and value == size]
    sizes = [name for name in equal if re.search("size|dim|head_d", name)]
    found: str = max(sizes or [*equal, ""], key=len)
    return found
