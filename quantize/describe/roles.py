"""What single linears do, by what they read and by what reads what they make."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from qdqbench.quantize.describe.flow import Flow, Step
from qdqbench.quantize.describe.frame import Frame, any_number
from qdqbench.quantize.families.family import Role

SECOND = "a feed-forward beside the widest, or last, of its layer"
STRANGE = "by what it reads it belongs to neither attention nor feed-forward"


@dataclass
class Found:
    """What the data flow says of single modules, by full name."""

    roles: dict[str, set[Role]] = field(default_factory=lambda: defaultdict(set))
    attentions: dict[str, int] = field(default_factory=dict)  # and head size
    products: set[str] = field(default_factory=set)  # modules whose products are those of an attention
    seconds: set[str] = field(default_factory=set)  # linears of feed-forwards beside the one of a layer

    def give(self, steps: Iterable[Step], role: Role) -> None:
        """Steps of linears get a role."""
        for step in steps:
            self.roles[step.module].add(role)


def attention_roles(flow: Flow) -> Found:
    """Linears around each softmax: what makes its scores, what it weighs, and what reads the result."""
    found = Found()
    for softmax in flow.of("softmax"):
        scores = flow.behind(softmax.reads[0], "product")
        for score in scores:
            queries, keys = (flow.behind(read, "linear") for read in score.reads[:2])
            if not (queries and keys) or queries[-1].reads != keys[-1].reads:
                continue  # a product with positions
            context, values = _weighed(flow, softmax)
            if context is None:
                continue
            one = queries == keys == values
            found.give(queries, "query, key, value" if one else "query")
            found.give(keys, "query, key, value" if one else "key")
            found.give(values, "query, key, value" if one else "value")
            found.give((s for s in flow.readers(context.number) if s.kind == "linear"), "output")
            found.attentions[softmax.module] = score.width
            found.products |= {score.module, context.module}
    return found


def _weighed(flow: Flow, softmax: Step) -> tuple[Step | None, list[Step]]:
    """The product with the values, and the linears that make them."""
    for step in flow.readers(softmax.number):
        if step.kind == "product":
            other = [read for read in step.reads if softmax.number not in read]
            if values := [s for read in other for s in flow.behind(read, "linear")]:
                return step, values
    return None, []


def feed_forward_roles(frame: Frame, found: Found) -> None:
    """Of each layer the widest linear that reads nothing but what linears made, and those linears."""
    pairs: dict[str, list[tuple[int, Step, list[Step]]]] = defaultdict(list)
    for step in frame.flow.of("linear"):
        place = frame.path(step.module)
        first = frame.flow.behind(step.reads[0], "linear")
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


def other_products(flow: Flow, found: Found, named: Callable[[str], str] = any_number) -> dict[str, str]:
    """What multiplies matrices and is no linear, nor the product of a recognised attention."""
    left = {}
    for step in flow.steps:
        if step.kind == "convolution":
            left[step.module] = "a convolution; only linears become INT8"
        elif step.kind == "own weights":
            left[step.module] = "it multiplies by weights of its own; only linears become INT8"
        elif step.kind == "product" and step.module not in found.products:
            left[step.module] = "a product of two activations outside of an attention"
    return {named(name): why for name, why in left.items()}


def reasons(left: Mapping[str, str]) -> str:
    """The first few for one sentence."""
    return "; ".join(f"{name}: {why}" for name, why in [*left.items()][:4])
