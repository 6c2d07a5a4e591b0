"""Which private names of ModelOpt are used, where, and that ModelOpt still has them."""

import ast
from pathlib import Path

import modelopt
import pytest
import torch

from qdqbench.quantize.calibration.fakequant.quantizers import import_modelopt
from qdqbench.quantize.utils.errors import UserError

ROOT = Path(__file__).parents[4]
HERE = ROOT / "quantize" / "calibration" / "fakequant" / "modelopt.py"
PRIVATE = {
    "TensorQuantizer": (
        "_amax",
        "_amax_setter_helper",
        "_calibrator",
        "_disabled",
        "_enable_pre_quant_scale",
        "_if_calib",
        "_if_quant",
        "_pre_quant_scale",
        "_quantizer_cache",
    ),
    "HistogramCalibrator": ("_calib_bin_edges", "_calib_hist"),
    "model_calib": ("_mse_quant_func",),
}
NAMES = {name for names in PRIVATE.values() for name in names}


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def names_in(tree):
    """Attributes, functions, imports from ModelOpt and texts of some code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("modelopt"):
            yield from (alias.name for alias in node.names)


def test_they_stand_in_one_file():
    others = [path for folder in ("quantize", "eval", "api") for path in (ROOT / folder).rglob("*.py")]
    assert len(others) > 100
    found = {str(path): set(names_in(parsed(path))) & NAMES for path in others if path != HERE}
    assert {name: names for name, names in found.items() if names} == {}


def test_those_that_are_listed_are_used_and_no_others():
    tree = parsed(HERE)
    used = list(names_in(tree))
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    torchs = {"_buffers", "_version"}
    assert {name for name in used if name.startswith("_") and name[1:2] != "_"} - own - torchs == NAMES


def test_modelopt_has_them():
    from modelopt.torch.quantization import model_calib
    from modelopt.torch.quantization.calib import HistogramCalibrator
    from modelopt.torch.quantization.nn import TensorQuantizer

    quantizer = TensorQuantizer()
    quantizer.amax = torch.ones(())
    quantizer.pre_quant_scale = torch.ones(2)
    owners = {
        "TensorQuantizer": quantizer,
        "HistogramCalibrator": HistogramCalibrator(num_bits=8, axis=None),
        "model_calib": model_calib,
    }
    lost = [
        f"{owner}.{name}"
        for owner, names in PRIVATE.items()
        for name in names
        if not hasattr(owners[owner], name)
    ]
    assert lost == []
    assert {"_amax", "_pre_quant_scale"} <= set(quantizer._buffers)


@pytest.mark.parametrize("version", ["0.48.0", "0.470.1", "0.46.9"])
def test_another_version_is_refused(version, monkeypatch):
    monkeypatch.setattr(modelopt, "__version__", version)
    with pytest.raises(UserError, match=rf"modelopt {version} is installed and qdqbench is made for 0\.47"):
        import_modelopt()
