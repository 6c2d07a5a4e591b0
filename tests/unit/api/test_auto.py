"""Which recipes `auto` starts with."""

import pytest

from qdqbench import _auto as auto
from qdqbench._options import AutoOptions
from qdqbench.quantize.engine import backend
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.gpu import Gpu

from ...support.families import write_model


def names(model, *, fast=False, given=(), **options):
    asked = AutoOptions(min_speedup=1.1 if fast else None, **options)
    return [recipe.name for recipe in auto._first_recipes(given, str(model), asked)]


@pytest.mark.parametrize(
    ("gpu", "fast", "wanted"),
    [
        (True, True, ["attention", "residual-fused", "linears"]),
        (True, False, ["attention", "linears"]),
        (False, True, ["linears"]),
    ],
)
def test_the_faster_recipe_is_tried_where_speed_is_asked_of_a_gpu(tiny_bert, monkeypatch, gpu, fast, wanted):
    here = Gpu(name="any", compute_capability="9.0", driver="1") if gpu else None
    for module in (auto, backend):
        monkeypatch.setattr(module, "find_gpu", lambda: here)
    assert names(tiny_bert, fast=fast, backend="openvino") == ["bert-int8-linears"]
    assert names(tiny_bert, fast=fast) == [f"bert-int8-{part}" for part in wanted]


def test_a_family_without_it_begins_as_ever(tmp_path, monkeypatch):
    for module in (auto, backend):
        monkeypatch.setattr(module, "find_gpu", lambda: Gpu("any", "9.0", "1"))
    model = write_model(tmp_path / "model", "albert")
    assert names(model, fast=True) == ["albert-int8-attention", "albert-int8-linears"]


def test_named_ones_come_in_their_order(tiny_bert):
    assert names(tiny_bert, fast=True, given=["bert-int8-ffn", "int8-linears"]) == [
        "bert-int8-ffn",
        "bert-int8-linears",
    ]
    with pytest.raises(UserError, match="two steps would be called"):
        names(tiny_bert, given=["int8-ffn", "bert-int8-ffn"])
