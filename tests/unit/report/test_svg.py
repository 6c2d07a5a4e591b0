"""SVG that templates put into a page as it is, and pages whose chart fails."""

from xml.etree import ElementTree

import pytest

from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report.render import write_report
from qdqbench.quantize.report.svg import INK, figure_of, svg_of

from ...support.reports import DOCUMENT


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
    assert not [each for each in ("#ffffff", "<metadata", "dc:date", INK) if each in text]
    assert text.startswith("<svg")  # without a header, which a page has no place for


def test_neither_file_is_written_where_a_chart_fails(tmp_path):
    def fail():
        raise ValueError("no chart")

    broken = doc.Report(DOCUMENT.page, [doc.Section("a", "A", [doc.Chart(fail)])])
    with pytest.raises(ValueError, match="no chart"):
        write_report(broken, tmp_path, "a")
    assert [*tmp_path.iterdir()] == []
    assert [path.name for path in write_report(DOCUMENT, tmp_path, "b")] == ["b.md", "b.html"]
