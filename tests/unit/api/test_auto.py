"""Which recipes `auto` starts with."""

import pytest

from qdqbench import _auto as auto
from qdqbench._options import AutoOptions
from qdqbench.quantize.engine import backend
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.gpu import Gpu

from ...support.families import write_model


def names(model, *, given=(), **options):
    asked = AutoOptions(model=str(model), **options)
    return [recipe.name for recipe in auto._first_recipes(given, str(model), asked)]


def test_the_recipe_to_start_with_comes_first(tiny_bert, tmp_path, monkeypatch):
    here = None
    monkeypatch.setattr(backend, "find_gpu", lambda: here)
    assert names(tiny_bert) == ["bert-int8-linears"]
    here = Gpu(name="any", compute_capability="9.0", driver="1")
    assert names(tiny_bert, backend="openvino") == ["bert-int8-linears"]
    assert names(tiny_bert) == ["bert-int8-residual-fused", "bert-int8-linears"]
    other = write_model(tmp_path / "model", "albert")
    assert names(other) == ["albert-int8-linears"]  # none was timed: the highest SQNR


def test_named_ones_come_in_their_order(tiny_bert):
    assert names(tiny_bert, given=["bert-int8-ffn", "int8-linears"]) == ["bert-int8-ffn", "bert-int8-linears"]
    with pytest.raises(UserError, match="two steps would be called"):
        names(tiny_bert, given=["int8-ffn", "bert-int8-ffn"])
