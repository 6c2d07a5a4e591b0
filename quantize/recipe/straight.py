"""Which INT8 attentions get k, v and q straight from their GEMMs; `quantize/calibrate/straight.py` says how.

Not where q and k are rotated, or where other terms read k before the softmax. What is added to the scores and
reads neither, such as a mask or MPNet's bias of positions, changes nothing.
"""

from qdqbench.quantize.core.names import count_of
from qdqbench.quantize.families.family import Role
from qdqbench.quantize.recipe.plan import Plan


def straight(plan: Plan) -> list[str]:
    """INT8 attentions whose k and v have linears of their own with one weight scale."""
    return [] if _why_kept(plan) else _meant(plan)


def shifted(plan: Plan) -> dict[str, str]:
    """Those of them whose q has one weight scale too, with the module whose bias can shift what all read."""
    linears = {*plan.int8, *plan.high}
    found = {name: plan.family.read_by(name, linears) for name in straight(plan)}
    return {name: by for name, by in found.items() if by and _one_scale(plan, name, "query")}


def merged(plan: Plan) -> list[str]:
    """Those of them whose q, k and v share all scales, so that an engine makes one GEMM of the three."""
    return [*shifted(plan)] if plan.merge_qkv else []


def straight_linears(plan: Plan) -> set[str]:
    """The linears that have neither scales nor a bias behind their GEMM."""
    found = {linear for name in straight(plan) for linear in linears_of(plan, name, "key", "value")}
    return found.union(*(linears_of(plan, name, "query") for name in shifted(plan)))


def notes_on(plan: Plan) -> list[str]:
    """Says which of q, k and v have one weight scale and keep their biases all the same, and why."""
    why, which, whole = _why_kept(plan), "q, k and v", shifted(plan)
    lost = [name for name in _meant(plan) if why or (_one_scale(plan, name, "query") and name not in whole)]
    if not why:
        which, why = "q", "what makes its input is not known"
        if plan.family.shared_layers:
            why = "what makes its input serves several runs of a layer"
    said = f"{which} of {count_of(len(lost), 'INT8 attention')} with weights: int8/tensor keep their biases, "
    return [f"{said}so that a kernel stands between GEMM and attention: {why}"] if lost else []


def linears_of(plan: Plan, attention: str, *roles: Role) -> list[str]:
    """Linears of an attention by their roles."""
    return [plan.family.made_by(attention, role).linear for role in roles]


def _meant(plan: Plan) -> list[str]:
    """INT8 attentions whose k and v have linears of their own with one weight scale."""
    return [name for name in plan.attention if all(_one_scale(plan, name, role) for role in ("key", "value"))]


def _why_kept(plan: Plan) -> str:
    """Why k cannot lose its bias in any model of a family; empty where it can."""
    if plan.family.rotary:
        return f"family {plan.family.name} rotates q and k"
    return f"family {plan.family.name} has other terms of scores that read k" if plan.family.terms else ""


def _one_scale(plan: Plan, attention: str, role: Role) -> bool:
    rows = plan.family.made_by(attention, role)
    return rows.parts == 1 and plan.int8.get(rows.linear) == "tensor"
