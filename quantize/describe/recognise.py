"""The description of a family from one of its models."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.describe import parts
from qdqbench.quantize.describe.fields import config_fields
from qdqbench.quantize.describe.flow import follow
from qdqbench.quantize.describe.frame import Frame, list_of_layers
from qdqbench.quantize.describe.roles import attention_roles, feed_forward_roles, other_products, reasons
from qdqbench.quantize.families.family import Family, Role
from qdqbench.quantize.machine.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEEDED: tuple[Role, ...] = ("query", "key", "value", "output", "ffn-in", "ffn-out")


@dataclass(frozen=True)
class Recognised:
    """A family described, and what of its models multiplies matrices and is not in it."""

    family: Family
    left: dict[str, str]  # module, as rules name it: why it stays in FP16 or FP32; numbers of layers are *
    gated: bool  # the feed-forward multiplies two halves, or what two linears made
    head_size: int
    attention: str  # inside a layer, also where it cannot be exchanged


def recognise(model: "PreTrainedModel") -> Recognised:
    """Describe the family of a model that is on the CPU, with weights of its own or random ones.

    Raises:
        UserError: a model that fails on a sample, a decoder, no attention, layers that do not stand in one
            list, or that lack a linear which every encoder has.
    """
    name = model.config.model_type
    try:
        with quiet("transformers"):
            flow = follow(model)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"a {name!r} of this configuration does not run on a sample of text ({text})"
        ) from error
    if not flow.ahead:
        raise UserError(
            f"a {name!r} is a decoder, as no token sees those behind it; only encoders are supported"
        )
    if not flow.same:
        raise UserError(
            f"a {name!r} gives other logits with the attention and the mask that are used here; its family "
            "needs a description by hand"
        )
    found = attention_roles(flow)
    if not found.attentions:
        strange = reasons(other_products(flow, found))
        raise UserError(
            f"no attention was recognised in a {name!r}, as no product of what two linears made goes through "
            f"a softmax to meet what a third made{f' ({strange})' if strange else ''}"
        )
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    frame = Frame(list_of_layers(found.attentions, modules, name), prefix, modules, flow)
    feed_forward_roles(frame, found)
    linears, left = parts.inside(frame, found)
    if shared := parts.shared(frame, linears):
        raise UserError(
            f"the layers of a {name!r} share weights: {shared} runs several times; its family needs a "
            "description by hand"
        )
    has = {part for role in linears.values() for part in role.split(", ")}
    if missing := [role for role in NEEDED if role not in has]:
        raise UserError(
            f"no linears of a {name!r} were recognised as {', '.join(missing)}: "
            f"{reasons(left) or 'it has none in its layers'}; its family needs a description by hand"
        )
    attention, size = [*found.attentions.items()][-1]
    layer, path = frame.path(attention) or ("", "")
    paths = {role: f"{layer}.{place}" for place, role in linears.items()}
    wide, read = modules[paths["ffn-in"]].out_features, modules[paths["ffn-out"]].in_features
    outside, unplaced = parts.outside(frame)
    family = Family(
        name=name,
        model_types=(name,),
        layers=frame.layers.removeprefix(prefix),
        linears=linears,
        outside=outside,
        attention=path if parts.replaceable(frame, found) else None,
        residuals=tuple(parts.residuals(frame, found)),
        norms=parts.norms(frame, found),
        embeddings=parts.embeddings(frame, model),
        embeddings_norm=parts.embeddings_norm(frame, model),
        embeddings_linear=parts.embeddings_linear(frame),
        pooler=parts.pooler(frame, outside),
        inputs=parts.inputs(frame),
        head_size=parts.attribute(modules[attention], size),
        positions_follow_padding=parts.positions_follow_padding(frame, model),
        layers_return_tuples=layer in flow.tuples,
        **config_fields(model, layer, paths["ffn-in"], wide),
    )
    gated = list(linears.values()).count("ffn-in") > 1 or wide != read
    left |= unplaced | other_products(flow, found, frame.pattern)
    short = {each.removeprefix(prefix): why for each, why in left.items()}
    return Recognised(family, short, gated, size, path)
