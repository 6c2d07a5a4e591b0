"""The cost model: its terms, its fit, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.eval.placement.cost_fit import LEAST_ROWS, fit_costs, read_rows
from qdqbench.eval.placement.cost_model import (
    COST_COLUMNS,
    ENCODER_KINDS,
    TERMS,
    CostModel,
    CostRow,
    ModelShape,
    Placement,
    load_cost_model,
    terms,
)
from qdqbench.quantize.core.errors import MissingDevice, UserError
from qdqbench.quantize.recipe.plan import Plan

from ...support.cost_rows_made import COEFFICIENTS, SMALL, TINY, made_rows, predicted

ROOT = Path(__file__).parents[3]
NAMES = list(TERMS)


def term(name, placement, model=SMALL, batch=32, length=128):
    return terms(model, placement, batch, length)[NAMES.index(name)]


def placed(model=SMALL, **shares):
    linears = {kind: (float(shares.get(kind, 0)),) * model.layers for kind in ENCODER_KINDS}
    return Placement(linears, (bool(shares.get("attention")),) * model.layers)


ALL = placed(qkv=1, output=1, **{"ffn-in": 1, "ffn-out": 1}, attention=1)


def test_exact_rows_give_the_latencies_back():
    model = fit_costs(made_rows(noise=0.0))
    for shape, batch, length in ((SMALL, 16, 64), (TINY, 2, 128)):
        for placement in (ALL, Placement.none(shape.layers)) if shape is SMALL else (Placement.none(2),):
            expected = predicted(shape, placement, batch, length)
            assert model.predict(shape, placement, batch, length) == pytest.approx(expected, rel=1e-3)
    assert model.leave_one_out.ms_p90 < 1e-3


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**16), st.floats(0, 0.2))
def test_coefficients_are_never_negative(seed, noise):
    model = fit_costs(made_rows(models=(TINY,), engines=5, noise=noise, seed=seed))
    assert set(model.coefficients) == set(TERMS)
    assert min(model.coefficients.values()) >= 0


def test_noise_shows_in_the_error_that_is_told():
    quiet, loud = (fit_costs(made_rows(noise=noise)).leave_one_out for noise in (0.001, 0.05))
    assert quiet.ms_median < loud.ms_median
    assert quiet.speedup_median < loud.speedup_median
    assert loud.ms_median < loud.ms_p90


@given(st.integers(1, 128), st.integers(16, 512))
def test_a_placement_moves_work_and_loses_none(batch, length):
    none = Placement.none(SMALL.layers)
    both = term("fp16_gemm", none, batch=batch, length=length)
    assert term("int8_gemm", none, batch=batch, length=length) == 0
    assert term("int8_gemm", ALL, batch=batch, length=length) == pytest.approx(both)
    assert term("fp16_gemm", ALL, batch=batch, length=length) == 0
    assert term("traffic", ALL, batch=batch, length=length) < term(
        "traffic", none, batch=batch, length=length
    )


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("gelu", placed(**{"ffn-in": 1})),
        ("borders", placed(**{"ffn-out": 1})),
        ("attention_int8", placed(output=1, attention=1)),
        ("heads", placed(output=1, attention=1)),
        ("unmerged", placed(qkv=1 / 3)),
    ],
)
def test_a_term_counts_what_only_some_placements_have(name, placement):
    assert term(name, placement) > 0
    assert term(name, Placement.none(SMALL.layers)) == 0


def test_a_product_below_one_wave_costs_as_much_as_a_wave():
    none = Placement.none(SMALL.layers)
    assert term("fp16_gemm", none, batch=1, length=16) == term("fp16_gemm", none, batch=1, length=64)
    assert term("fp16_gemm", none, batch=128) > 2 * term("fp16_gemm", none, batch=32)


def test_placement_of_a_plan_and_of_a_row():
    names = [f"bert.encoder.layer.{n}.attention.self.{x}" for n in (0, 1) for x in ("query", "key", "value")]
    outputs = [f"bert.encoder.layer.{n}.attention.output.dense" for n in (0, 1)]
    plan = Plan(
        int8=dict.fromkeys([*names[:3], names[3], *outputs], "channel"),
        high=(*names[4:], "classifier"),
        attention=("bert.encoder.layer.1.attention.self",),
    )
    found = Placement.of_plan(plan, 2)
    assert found.linears["qkv"] == (1.0, pytest.approx(1 / 3))
    assert found.linears["output"] == (1.0, 1.0)
    assert found.attention == (False, True)
    row = Placement.parse({"qkv": "10", "output": "11", "ffn-in": "00", "ffn-out": "01", "attention": "01"})
    assert row.linears["ffn-out"] == (0.0, 1.0)
    assert row.attention == (False, True)


def test_a_file_keeps_everything(tmp_path):
    model = fit_costs(made_rows())
    path = tmp_path / "cost.json"
    path.write_text(model.model_dump_json())
    assert load_cost_model(path) == model
    assert "modelled, not measured" in model.label
    assert model.n == len(model.rows) == len(read_rows(path))
    again = fit_costs(model.rows)
    assert again.coefficients == pytest.approx(model.coefficients)


def test_sizes_outside_of_the_data_are_named():
    model = fit_costs(made_rows())
    assert model.outside(SMALL, 32, 128) == []
    assert "at batch 16 x 128 tokens" in " ".join(model.outside(SMALL, 16, 128))
    gated = ModelShape(layers=12, hidden=768, intermediate=3072, heads=12, gated=True)
    assert "gated True (measured: False to False)" in model.outside(gated, 32, 128)
    large = ModelShape(layers=24, hidden=1024, intermediate=4096, heads=16)
    said = " ".join(model.outside(large, 256, 128))
    assert all(word in said for word in ("layers 24", "hidden 1024", "batch 256"))
    assert "length" not in said
    alike = [row for row in made_rows() if not row.mixed] + made_rows(models=(TINY,), engines=1)
    assert "a border costs nothing" in " ".join(fit_costs([*alike, *alike]).outside(SMALL, 32, 128))


def test_a_shipped_model_is_used_or_its_absence_says_how_to_make_one(monkeypatch, tmp_path):
    monkeypatch.setattr("qdqbench.eval.placement.cost_model.DATA", "no-such-file.json")
    with pytest.raises(MissingDevice, match="qdqbench cost measure"):
        load_cost_model()


@pytest.mark.parametrize("text", ["{}", '{"schema_version": 2}', "[]"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match="no cost model of this version"):
        load_cost_model(path)


def test_rows_are_read_up_to_a_torn_line(tmp_path):
    rows = made_rows(models=(TINY,), engines=1)
    path = tmp_path / "rows.jsonl"
    text = "".join(row.model_dump_json() + "\n" for row in rows)
    path.write_text(text + '{"name": "torn')
    assert read_rows(path) == rows
    path.write_text('{"name": "wrong"}\n' + text)
    with pytest.raises(UserError, match="line 1"):
        read_rows(path)


def test_rows_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match="too few"):
        fit_costs(made_rows(models=(TINY,), engines=1)[: LEAST_ROWS - 1])
    with pytest.raises(UserError, match="of one engine"):
        fit_costs(4 * made_rows(models=(TINY,), engines=1))
    with pytest.raises(UserError, match="another GPU"):
        fit_costs([*made_rows(), *made_rows(gpu="another GPU")])


@pytest.mark.parametrize("change", [{"qkv": "1"}, {"attention": "111"}])
def test_a_row_needs_every_layer(change):
    row = json.loads(made_rows(models=(TINY,), engines=1)[0].model_dump_json())
    row["placement"] |= change
    with pytest.raises(ValueError, match="one character for each layer"):
        CostRow.model_validate(row)


def test_terms_are_finite_and_known():
    counts = terms(SMALL, ALL, 8, 128)
    assert counts.shape == (len(TERMS),)
    assert np.isfinite(counts).all()
    assert set(COEFFICIENTS) == set(TERMS)
    assert set(COST_COLUMNS) == {*ENCODER_KINDS, "attention"}
    assert isinstance(fit_costs(made_rows()), CostModel)
