"""Parts of an encoder by what all families call them.

For names in ONNX files, engines and results, where no configuration says of which family they are.
"""

import re
from collections.abc import Iterable

from qdqbench.quantize.models.families.known import FAMILIES

ANY_LAYER = re.compile(r"(?:^|[/._])layers?[./](\d+)(?=[/.]|$)")
RUN = re.compile(r"@(\d+)(?=[^/]*$)")  # in names of what runs several times with the same weights
ANY_HEAD = re.compile(
    r"(?:^|/)(?:pooler|pooling|classifier|cls|head|score|qa_outputs|logits)(?=[/_.]|$)", re.IGNORECASE
)
ANY_EMBEDDINGS = re.compile(r"(?:^|[/.])embeddings?(?=[/.]|$)")
ANY_QKV = re.compile(r"(?:query|key|value|[qkv])(?:_proj|_lin)?")  # the last part of a linear's name
ANY_MERGED_QKV = re.compile(r"w?qkv(?:_proj)?|in_proj|query_key_value", re.IGNORECASE)
ACTIVATION = re.compile(r"(?:\w+_)?act_fn|act|activation")  # the module of an activation
SILENT = ("self", "dense")  # parts of a name that say nothing
_CALLED: dict[str, tuple[str, ...]] = {
    "query": ("attention.self.query", "attention.q_lin", "attention.self.query_proj", "attention.attn.q"),
    "key": ("attention.self.key", "attention.k_lin", "attention.self.key_proj", "attention.attn.k"),
    "value": ("attention.self.value", "attention.v_lin", "attention.self.value_proj", "attention.attn.v"),
    "query, key, value": ("attn.Wqkv",),
    "attention": ("attention.self", "attention.attn", "attention", "attn"),
    "output": ("attention.output.dense", "attention.out_lin", "attention.attn.o", "attn.Wo"),
    "ffn-in": ("intermediate.dense", "ffn.lin1", "mlp.Wi"),
    "ffn-out": ("output.dense", "ffn.lin2", "mlp.Wo"),
}
PARTS = tuple(_CALLED)  # of a layer, in the order of computation
_PART = {path: part for part, paths in _CALLED.items() for path in paths}
_PART |= {family.attention: "attention" for family in FAMILIES if family.attention}
_PART |= {path: role for family in FAMILIES for path, role in family.linears.items()}


def part_of(module: str) -> tuple[int, str, str] | None:
    """Return layer or run, part (one of `PARTS`, or "") and path of a module; None outside of layers."""
    name, _, run = module.partition("@")
    found = re.match(r"(?:.*?\.)?(\d+)\.(.+)$", name)
    return (int(run or found[1]), _PART.get(found[2], ""), found[2]) if found else None


def layer_of_node(node: str) -> int | None:
    """Return the encoder layer of an ONNX node, or which run of one; None outside of the encoder."""
    found = (RUN.search(node) if ANY_LAYER.search(node) else None) or ANY_LAYER.search(node)
    return int(found[1]) if found else None


def first_feed_forwards(linears: Iterable[str]) -> str | None:
    """Return the pattern of a rule for the first feed-forward linears; None where no family has them."""
    for name in linears:
        for family in FAMILIES:
            place = family.place(name)
            if place and family.linears.get(place.path) == "ffn-in":
                return f"{family.layers}.*.{place.path.rpartition('.')[0]}.*"
    return None


def adds_behind_attention(module: str) -> bool:
    """Return whether the residual that a module adds is that of the attention, in any family."""
    return any(family.behind_attention(module) for family in FAMILIES)
