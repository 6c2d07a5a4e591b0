"""Encoder families as data: names of modules and config fields, and the few ways in which models differ."""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qdqbench.quantize.models.families.others import explain_other
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Role = Literal[
    "query", "key", "value", "query, key, value", "output", "ffn-in", "ffn-out", "pooler", "classifier",
    "embeddings", "other",
]  # fmt: skip
Norm = Literal["attention", "ffn", "attention input", "ffn input"]

# What sensitivity and search move between precisions: q, k and v go together.
ENCODER_KINDS = ("qkv", "output", "ffn-in", "ffn-out")
LINEAR_KINDS = (*ENCODER_KINDS, "pooler", "classifier")
QKV: tuple[Role, ...] = ("query", "key", "value", "query, key, value")
# over tokens, any family; from the transform on, of masked language models
HEADS: dict[str, Role] = {
    "classifier": "classifier",
    "qa_outputs": "classifier",
    "pooling.dense": "pooler",
    "predictions.transform.dense": "pooler",
    "lm_head.dense": "pooler",
    "vocab_transform": "pooler",
    "decoder": "classifier",
    "vocab_projector": "classifier",
}
# what `smoothing` of the calibration section means: linears that read a LayerNorm
SMOOTHED = ("qkv", "ffn-in")


class Place(NamedTuple):
    """Place of a module in the encoder: `bert.encoder.layer`, 0 and `output.dense`."""

    layers: str
    number: int
    path: str  # inside the layer; empty for the layer itself


class LinearRows(NamedTuple):
    """One of equal parts of the rows of a linear's weight."""

    linear: str
    part: int
    parts: int


@dataclass(frozen=True)
class Residual:
    """A tensor that a layer adds to what a linear made."""

    module: str  # that adds it, inside a layer; empty: the layer itself
    readers: tuple[Role, ...]  # linears that read the same tensor; none after a LayerNorm of its own


@dataclass(frozen=True)
class Family:
    """One family of encoders. Paths are inside a layer where nothing else is said."""

    name: str  # `model.family` of a recipe
    model_types: tuple[str, ...]  # of config.json
    layers: str  # path of the layers inside the base model; * stands for a number
    linears: Mapping[str, Role]
    outside: Mapping[str, Role]  # ends of the names of linears that are in no layer
    attention: str | None  # None: it stays as it is, in FP16
    residuals: tuple[Residual, ...]  # that of the attention first; none where a quantizer has no place
    norms: Mapping[str, Norm]  # what each LayerNorm of a layer normalizes
    embeddings: str  # in the base model
    embeddings_norm: str  # in the base model
    pooler: str | None  # in the base model
    dropouts: tuple[str, ...]  # fields of the config, as all that follow
    activation: str  # of the feed-forward
    intermediate: str  # width of the feed-forward
    inputs: tuple[str, ...]  # of `forward`, in the order of the graph's inputs
    head_size: str = "attention_head_size"  # attribute of the attention
    positions_follow_padding: bool = False  # the first token has position pad_token_id + 1
    feed_forward_share: str = "two thirds"  # of the encoder's arithmetic
    gated: bool = False  # the first feed-forward makes every channel, then the gate of every channel
    rotary: bool = False  # q and k are rotated: channels d and d + D / 2 of each head are one pair
    windows: bool = False  # some layers see a window alone, which padding may fill
    terms: tuple[str, ...] = ()  # modules of products that are no linear's and not the attention's own
    rewritten: bool = False  # `quantize/models/rewritten.py` sends its attention through AttentionInterface
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values of fields that are supported
    given_sums: bool = False  # and gives its layers a module for each residual
    layers_return_tuples: bool = False
    shared_layers: bool = False  # each layer is a group, whose weights run several times
    embeddings_linear: str | None = None  # in the base model, where one stands before the layers

    def place(self, name: str) -> Place | None:
        layers = re.escape(self.layers).replace(r"\*", r"\d+")
        found = re.match(rf"((?:.+?\.)?{layers})\.(\d+)(?:\.(.+))?$", name)
        return Place(found[1], int(found[2]), found[3] or "") if found else None

    def layer_of(self, name: str) -> int | None:
        place = self.place(name)
        return place.number if place else None

    def role(self, linear: str) -> Role:
        """Return the role of a linear; a UserError for an unknown one, as of all that take a linear here."""
        if (found := self._role(linear)) is None:
            raise UserError(_unknown([linear], self))
        return found

    def has_role(self, module: str, role: str) -> bool:
        """Return whether a linear has a role (`qkv`: any of the three), or any module is in the `encoder`."""
        if role == "encoder":
            return self.place(module) is not None
        found = self._role(module)
        return role == found or (role == "qkv" and found in QKV)

    def kind(self, linear: str) -> str:
        role = self.role(linear)
        return "qkv" if role in QKV else role

    def require_known(self, linears: Iterable[str]) -> None:
        if lost := [name for name in linears if self._role(name) is None]:
            raise UserError(_unknown(lost, self))

    def beside(self, name: str, role: Role) -> str | None:
        """Return the linear with a role in the layer that a module is in; None where the family has none."""
        place = self.place(name)
        path = next((path for path, found in self.linears.items() if found == role), None)
        return f"{place.layers}.{place.number}.{path}" if place and path else None

    def require_beside(self, name: str, role: Role) -> str:
        if (found := self.beside(name, role)) is None:
            raise UserError(f"family {self.name} has no linear of its own for {role} next to {name}")
        return found

    def made_by(self, name: str, role: Role) -> LinearRows:
        """Return the maker of q, k or v in a module's layer: a linear of its own, or a part of one."""
        place = self.place(name)
        for path, roles in ((path, found.split(", ")) for path, found in self.linears.items()):
            if place and role in roles:
                return LinearRows(f"{place.layers}.{place.number}.{path}", roles.index(role), len(roles))
        raise UserError(f"family {self.name} has no linear that makes the {role} next to {name}")

    def read_by(self, attention: str, linears: Container[str]) -> str | None:
        """Return the LayerNorm, or linear behind the embeddings, whose output only q, k, v and residual read.

        None where it serves several runs, where what is normalized is not the residual, or where it is not
        known. Not every model has a linear behind its embeddings: `linears` are those that it has.
        """
        place = self.place(attention)
        if place is None or not self.layer_end or self.shared_layers or "*" in self.layers:
            return None
        if place.number:
            return f"{place.layers}.{place.number - 1}.{self.layer_end}"
        base = place.layers.removesuffix(self.layers)
        if self.embeddings_linear and (linear := f"{base}{self.embeddings_linear}") in linears:
            return linear
        return f"{base}{self.embeddings_norm}" if self.embeddings_norm else None

    def splittable(self, linears: Iterable[str]) -> list[str]:
        """Return the second feed-forward linears: outlier channels of these can be split."""
        return [name for name in linears if self.kind(name) == "ffn-out"]

    def residual_readers(self, module: str) -> tuple[str, ...]:
        place = self.place(module)
        added = [each for each in self.residuals if place and each.module == place.path]
        linears = (self.beside(module, role) for each in added for role in each.readers)
        return tuple(filter(None, linears))

    def residual_read_by(self, linear: str) -> str | None:
        """Return the module whose residual a linear reads; None for none, or if known by another linear."""
        place = self.place(linear)
        first = {each.readers[0]: each.module for each in self.residuals if each.readers}
        module = first.get(self.linears[place.path]) if place and place.path in self.linears else None
        return f"{place.layers}.{place.number}.{module}".rstrip(".") if place and module is not None else None

    @property
    def why_no_int8_residual(self) -> str:
        """Why what layers add cannot be INT8; empty where it can."""
        if self.residuals:
            return ""
        if self.layer_end:
            return f"family {self.name} has no place for a quantizer where it adds its residuals"
        return (
            f"family {self.name} normalizes first: no linear reads what its layers add, so INT8 would save "
            "nothing there"
        )

    @property
    def why_k_keeps_bias(self) -> str:
        """Why k cannot lose its bias in any model of the family; empty where it can."""
        if self.rotary:
            return f"family {self.name} rotates q and k"
        return f"family {self.name} has other terms of scores that read k" if self.terms else ""

    def behind_attention(self, module: str) -> bool:
        """Return whether a module takes what an attention made, up to the LayerNorm behind it."""
        ends = [path for path, role in self.linears.items() if role == "output"]
        ends += [path for path, what in self.norms.items() if what == "attention"]
        ends += [each.module for each in self.residuals[:1] if each.module]
        place = self.place(module)
        return place is not None and any(f"{place.path}.".startswith(f"{end}.") for end in ends)

    @property
    def layer_end(self) -> str:
        """The LayerNorm that a layer ends with; empty where it ends with a sum of its own."""
        return next((path for path, what in self.norms.items() if what == "ffn"), "")

    def layer_names(self, model: "PreTrainedModel") -> list[str]:
        found = ((name, self.place(name)) for name, _ in model.named_modules())
        return [name for name, place in found if place and not place.path]

    def runs(self, model: "PreTrainedModel") -> list[str]:
        """Return the encoder layers of a model as they run: a shared one once for each of its runs."""
        names = self.layer_names(model)
        runs = int(model.config.num_hidden_layers or 0) if self.shared_layers else len(names)
        return [names[number] for number in self.run_order(len(names), runs)]

    def run_order(self, layers: int, runs: int) -> list[int]:
        """Return which layer each run is of; layers that are not shared run once."""
        return [int(run / (runs / layers)) for run in range(runs)]  # as transformers rounds it

    def adds_residual(self, name: str) -> bool:
        place = self.place(name)
        return place is not None and any(each.module == place.path for each in self.residuals)

    def residual_classes(self, model: "PreTrainedModel") -> list[type]:
        adders = (type(module) for name, module in model.named_modules() if self.adds_residual(name))
        return list(dict.fromkeys(adders))

    def require_supported(self, config: Any, model: str) -> None:
        needs = {**self.needs, "is_decoder": (False, None)}  # no token is hidden from those before it
        found = {name: getattr(config, name, None) for name in needs}
        if lost := [f"{name} {value!r}" for name, value in found.items() if value not in needs[name]]:
            wanted = ", ".join(f"{name} {values[0]!r}" for name, values in needs.items())
            raise UserError(
                f"model {model} has {', '.join(lost)} in config.json; of family {self.name} only models "
                f"with {wanted} are supported{explain_other(found.values())}"
            )

    def positions(self, config: Any) -> int:
        """Return the number of tokens that a sample can have at most."""
        taken = int(config.pad_token_id) + 1 if self.positions_follow_padding else 0
        return int(config.max_position_embeddings) - taken

    def _role(self, linear: str) -> Role | None:
        place = self.place(linear)
        if place:
            return self.linears.get(place.path)
        known = {**self.outside, **HEADS}
        ends = (role for end, role in known.items() if f".{linear}".endswith(f".{end}"))
        return next(ends, None)


def _unknown(linears: list[str], family: Family) -> str:
    known = ", ".join([*family.linears, *family.outside])
    return f"family {family.name} has no linears such as {name_list(linears)}, only {known}"
