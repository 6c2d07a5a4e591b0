"""SVG that templates put into a page as it is."""

from xml.etree import ElementTree

import pytest

from qdqbench.quantize.report.svg import figure_of, svg_of


@pytest.mark.parametrize(
    "name", ['"><script>alert(1)</script>', "a & b < c", 'it\'s "quoted"', "$x$ \\frac", "plain"]
)
def test_a_hostile_name_stays_a_name(name):
    figure = figure_of(2.0)
    figure.subplots().set_title(name)
    text = svg_of(figure, "chart", f"metric of {name}")
    found = ElementTree.fromstring(text)
    assert found.attrib["aria-label"] == f"metric of {name}"
    assert not [each.tag for each in found.iter() if each.tag.endswith("script")]
    assert "<script" not in text
    (title,) = (each for each in found.iter() if each.text == name)  # no formula of it
    assert "fill: currentColor" in title.attrib["style"]  # on a dark page too, as no background is drawn
    assert "#ffffff" not in text
    assert text.startswith("<svg")  # without a header, which a page has no place for
