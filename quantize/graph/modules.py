"""Resolve a recipe against an ONNX file alone: its node names hold the module paths."""

from pathlib import Path

from qdqbench.quantize.graph.index import MATMULS, GraphIndex, module_of
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.graph.residuals import residuals
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.recipe.schema import load_recipe


def recipe_modules(onnx_file: Path, recipe: str) -> set[str]:
    """Modules whose MatMul and Gemm nodes, or whose residual, the recipe wants in INT8.

    Linears are the modules with a MatMul or Gemm, less the attentions, which have a Softmax. The head
    size is not in the names, so the check of the attention itself judges it.

    Raises:
        UserError: unreadable file or recipe, or rules that match nothing in it.
    """
    loaded, model = load_recipe(recipe), read_model(onnx_file)
    family = family_named(loaded.model.family)
    modules: dict[str, ModuleInfo] = {}
    for node in model.graph.node:
        if node.op_type in MATMULS:
            place = family.place(module := module_of(node.name))
            if place is None or place.path not in family.terms:
                modules.setdefault(module, ModuleInfo("Linear"))
        elif node.op_type == "LayerNormalization":
            modules[module_of(node.name)] = ModuleInfo("LayerNorm")
        elif node.op_type == "Softmax":
            modules[module_of(node.name)] = ModuleInfo("Attention", head_size=64)
            modules[f"{module_of(node.name)}.softmax"] = ModuleInfo("Softmax")
    added = [found.module for found in residuals(GraphIndex(model))]
    modules |= {name: ModuleInfo("Residual") for name in added if family.residual_readers(name)}
    prefix = next(iter(modules), "").partition(".")[0]
    plan = resolve(loaded, modules, prefix)
    return {*plan.int8, *plan.attention, *plan.residual}
