"""The schema is documented, and the reports say what it holds, whatever the names are."""

import pytest

from qdqbench.eval.selection.sensitivity.report import _shorten, sensitivity_headline, sensitivity_report
from qdqbench.eval.selection.sensitivity.results import ranking
from qdqbench.quantize.report.document import Chart, Columns

from ....support.choices import compared, sample_sensitivity


def test_ranking_is_by_sqnr_of_what_a_recipe_can_keep():
    found = ranking(sample_sensitivity().rows)
    amounts = [row.only.noise_power for row in found]
    assert amounts == sorted(amounts, reverse=True)
    assert len(found) == 9
    assert "classifier" not in [row.name for row in found]


def test_nothing_to_divide_by():
    """A model that INT8 does not change at all."""
    found = sample_sensitivity()
    found.full, found.choice.kept = compared(0, 0), 0
    for each in found.rows:
        each.only = compared(0, 0)
        each.all_but = each.all_but and compared(0, 0)
    for point in found.curve:
        point.comparison = compared(0, 0)
    assert "alone makes nothing" in sensitivity_headline(found)
    charts = sensitivity_report(found).sections[0].blocks[0]
    assert isinstance(charts, Columns)
    drawn = [block.draw() for part in charts.parts for block in part if isinstance(block, Chart)]
    assert len(drawn) == 3
    assert all("nan" not in svg for svg in drawn)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("layer.11.attention.output.dense", "layer.11.attention.output.dense"),
        ("albert_layer_groups.0.albert_layers.0.attention.query", "0: attention.query"),
        ("albert_layer_groups.1.albert_layers.0.ffn", "1: albert_layers.ffn"),
        *[("a_module_outside_of_all_layers_with_a_long_name",) * 2],
    ],
)
def test_a_wide_name_is_told_by_its_layer_and_its_end(name, shown):
    assert _shorten(name) == shown
