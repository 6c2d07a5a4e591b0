"""Explicit Q/DQ INT8 for BERT-class encoders: the Python API (docs/tutorials/python.md)."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdqbench._auto import auto
    from qdqbench._bench import bench
    from qdqbench._models import Exported, Quantized, check, export, load, load_embedder, quantize
    from qdqbench._progress import StageProgress
    from qdqbench._runs import build, evaluate, load_recipe, predict, qat, resume, run
    from qdqbench._train import finetune
    from qdqbench.eval.bench.results import Bench
    from qdqbench.eval.metrics.mteb import mteb_encoder
    from qdqbench.eval.runs.results import Results
    from qdqbench.eval.selection.auto.results import Auto
    from qdqbench.quantize.calibration.record import CalibrationRecord
    from qdqbench.quantize.deployment.predict import Predicted, Predictor
    from qdqbench.quantize.engine.results import EngineResult
    from qdqbench.quantize.lint.check import CheckReport
    from qdqbench.quantize.recipe.schema import Recipe
    from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, QdqError, UserError

# where each name lives: nothing is imported before it is asked for, so that `import qdqbench` is instant
_HOMES = {
    "_auto": "auto",
    "_bench": "bench",
    "_models": "Exported Quantized check export load load_embedder",
    "_progress": "StageProgress",
    "_runs": "build evaluate load_recipe predict qat resume run",
    "_train": "finetune",
    "eval.selection.auto.results": "Auto",
    "eval.bench.results": "Bench",
    "eval.metrics.mteb": "mteb_encoder",
    "quantize.calibration.record": "CalibrationRecord",
    "quantize.deployment.predict": "Predicted Predictor",
    "quantize.lint.check": "CheckReport",
    "quantize.utils.errors": "CheckFailed MissingDevice QdqError UserError",
    "eval.runs.results": "Results",
    "quantize.engine.results": "EngineResult",
    "quantize.recipe.schema": "Recipe",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Auto",
    "Bench",
    "CalibrationRecord",
    "CheckFailed",
    "CheckReport",
    "EngineResult",
    "Exported",
    "MissingDevice",
    "Predicted",
    "Predictor",
    "QdqError",
    "Quantized",
    "Recipe",
    "Results",
    "StageProgress",
    "UserError",
    "auto",
    "bench",
    "build",
    "check",
    "evaluate",
    "export",
    "finetune",
    "load",
    "load_embedder",
    "load_recipe",
    "mteb_encoder",
    "predict",
    "qat",
    "quantize",
    "resume",
    "run",
]


class _Quantize(ModuleType):
    """`qdqbench.quantize` is a package and a function: Python puts the package under that name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `qdqbench._models.quantize`."""
        return importlib.import_module(f"{__name__}._models").quantize(*args, **kwargs)


importlib.import_module(f"{__name__}.quantize").__class__ = _Quantize


def __getattr__(name: str) -> Any:
    """A public name from its module (PEP 562)."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version(__name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
