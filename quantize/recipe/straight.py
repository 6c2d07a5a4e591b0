"""Which INT8 attentions get k, v and q straight from their GEMMs; `quantize/calibrate/straight.py` says how.

Not where q and k are rotated, or where other terms read k before the softmax.
"""

from qdqbench.quantize.families.family import Role
from qdqbench.quantize.recipe.plan import Plan


def straight(plan: Plan) -> list[str]:
    """INT8 attentions whose k and v have linears of their own with one weight scale."""
    family = plan.family
    if family.rotary or family.terms:
        return []
    return [name for name in plan.attention if all(_one_scale(plan, name, role) for role in ("key", "value"))]


def shifted(plan: Plan) -> list[str]:
    """Those of them whose q has one weight scale too, and where a LayerNorm makes what all three read."""
    return [
        name
        for name in straight(plan)
        if _one_scale(plan, name, "query") and plan.family.norm_read_by(name) is not None
    ]


def merged(plan: Plan) -> list[str]:
    """Those of them whose q, k and v share all scales, so that an engine makes one GEMM of the three."""
    return shifted(plan) if plan.merge_qkv else []


def straight_linears(plan: Plan) -> set[str]:
    """The linears that have neither scales nor a bias behind their GEMM."""
    found = {linear for name in straight(plan) for linear in linears_of(plan, name, "key", "value")}
    return found.union(*(linears_of(plan, name, "query") for name in shifted(plan)))


def linears_of(plan: Plan, attention: str, *roles: Role) -> list[str]:
    """Linears of an attention by their roles."""
    return [plan.family.made_by(attention, role).linear for role in roles]


def _one_scale(plan: Plan, attention: str, role: Role) -> bool:
    rows = plan.family.made_by(attention, role)
    return rows.parts == 1 and plan.int8.get(rows.linear) == "tensor"
