"""`cost measure` and the engine timer with engines that are files: placements, rows, budget and failures."""

import pytest
from typer.testing import CliRunner

from qdqbench.eval.placement import measure as cost_measure
from qdqbench.eval.placement.cost_fit import read_rows
from qdqbench.eval.placement.cost_model import COST_COLUMNS, load_cost_model
from qdqbench.eval.placement.measure import measure_costs
from qdqbench.eval.placement.random import choose_placements, columns
from qdqbench.eval.placement.space import make_space
from qdqbench.quantize.cli.app import app
from qdqbench.quantize.core.errors import MissingDevice, UserError
from qdqbench.quantize.encoders.load import load_model
from qdqbench.quantize.encoders.modules import module_table
from qdqbench.quantize.recipe.schema import load_recipe

from ...support import fake_engines
from ...support.cost_rows_made import made_rows
from ...support.tiny_bert import new_bert, write_tiny_bert

SHAPES = [(1, 32), (8, 128)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_bert(tmp_path_factory.mktemp("tiny") / "small")


@pytest.fixture
def measure(folder, tmp_path, monkeypatch):
    """Measure the tiny model; says what was said."""
    fake_engines.install(monkeypatch)

    def run(placements=4, model=None, shapes=SHAPES, **changes):
        said = []
        done = measure_costs(
            str(model or folder),
            shapes,
            tmp_path / "rows.jsonl",
            placements=placements,
            seed=0,
            say=said.append,
            on_gpu=False,
            **{"budget_s": None, **changes},
        )
        return done, said, tmp_path / "rows.jsonl"

    return run


def test_every_placement_gives_a_row_of_each_shape(measure):
    done, said, path = measure()
    rows = read_rows(path)
    assert (done.engines, done.rows) == (4, 8)
    assert len(rows) == 8
    assert len(said) == 4
    assert [(row.batch, row.length) for row in rows[:2]] == SHAPES
    assert rows[0].placement == dict.fromkeys(COST_COLUMNS[:4], "11") | {"attention": "00"}
    assert rows[2].placement == dict.fromkeys(COST_COLUMNS, "11")
    assert rows[0].ms_fp16 == pytest.approx(fake_engines.TWIN_MS)
    # 12 linears in INT8, and with attention four more products
    assert rows[0].ms_int8 == pytest.approx(fake_engines.TWIN_MS / (1 + 0.05 * 12))
    assert rows[2].ms_int8 == pytest.approx(fake_engines.TWIN_MS / (1 + 0.05 * 16))
    assert rows[0].name == "small"
    assert all(engine.closed for engine in fake_engines.opened)
    assert len(fake_engines.opened) == 5  # one twin for all


def test_a_second_run_adds_what_is_missing(measure):
    measure(placements=1)
    done, _, path = measure(placements=3)
    assert done.engines == 2
    assert len({row.engine for row in read_rows(path)}) == 3


def test_other_shapes_are_missing_too_and_a_torn_line_goes(measure):
    _, _, path = measure(placements=2, shapes=SHAPES[:1])
    with path.open("a") as stream:
        stream.write('{"name": "smal')
    done, _, _ = measure(placements=2)
    assert (done.engines, done.rows) == (2, 2)
    found = read_rows(path)
    assert sorted({(row.batch, row.length) for row in found}) == SHAPES
    assert len(found) == 4


def test_the_budget_stops_in_order(measure):
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    done, _, path = measure(placements=6, budget_s=8.0, clock=clock)
    assert 0 < done.engines < 6
    assert "stopped" in done.ended
    assert len(read_rows(path)) == 2 * done.engines


def test_an_engine_that_fails_is_said_and_passed_over(measure):
    fake_engines.unproven.append(True)
    done, said, path = measure(placements=2)
    assert done.engines == 0
    assert "2 engines failed" in done.ended
    assert all("do not run in INT8" in text for text in said)
    assert not path.exists()


def test_wrong_outputs_are_no_measurement(measure):
    fake_engines.spoilt.append(True)
    done, said, _ = measure(placements=1)
    assert done.engines == 0
    assert "NaN" in said[0]


def test_a_broken_gpu_ends_it(measure, monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(fake_engines.Timer, "latencies", broken)
    with pytest.raises(Exception, match="CUDA error"):
        measure(placements=1)


def test_a_model_without_int8_attention_is_measured_too(measure, tmp_path):
    folder = write_tiny_bert(tmp_path / "heads", new_bert(heads=4))  # head size 8
    done, _, path = measure(placements=3, model=folder)
    assert done.engines == 3
    assert {row.placement["attention"] for row in read_rows(path)} == {"00"}


def test_a_shape_that_no_profile_takes(measure):
    with pytest.raises(UserError, match="--batch 500"):
        measure(shapes=[(500, 128)])


def test_without_a_gpu_it_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(cost_measure, "find_gpu", lambda: None)
    with pytest.raises(MissingDevice, match="no NVIDIA GPU"):
        measure_costs(
            "minilm", SHAPES, tmp_path / "x", placements=1, seed=0, budget_s=None, say=lambda text: None
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("count", [1, 5, 30])
def test_placements_differ_and_can_be_built(folder, count):
    model = load_model(str(folder))
    space = make_space(load_recipe("bert-int8-attention"), module_table(model), model.base_model_prefix)
    found = choose_placements(space, count, seed=0)
    assert len(found) == len(set(found)) == count
    assert found == choose_placements(space, count, seed=0)
    for units, attention in found:
        assert units
        assert all((layer, "output") in units for layer in attention)
        marks = columns((units, attention), range(2))
        assert sum(text.count("1") for text in marks.values()) == len(units) + len(attention)


def test_fit_writes_a_model_and_tells_its_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(row.model_dump_json() + "\n" for row in made_rows()))
    done = CliRunner().invoke(
        app, ["cost", "fit", str(path), str(path), "--out", str(tmp_path / "cost.json")]
    )
    assert done.exit_code == 0, done.exception
    assert "engines left out" in " ".join(done.stdout.split())
    assert load_cost_model(tmp_path / "cost.json").n == len(made_rows())
