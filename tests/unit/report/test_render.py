"""One document as Markdown, as a page and on a terminal."""

from io import StringIO

import pytest
from rich.console import Console

from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report.render import render_html, render_markdown, render_screen, write_report

TABLE = doc.Table(
    ["name", "ms", "remark"],
    [
        doc.row(doc.code("layer.0"), doc.Cell("1.50", short="1.5", sort=1.5), None, chosen=True),
        doc.row("<b>|x|", doc.Cell("0.90x", "bad", note="slower"), doc.Cell(state="good", tip="why")),
        doc.row("third", doc.Cell("failed: *why*", "bad")),
    ],
    texts=(0, -1),
    look="full sortable",
    foot=[doc.row("mean", "2")],
    anchor="times",
    screen=(0, 1),
    most=2,
    on=doc.EVERYWHERE,
)
REPORT = doc.Report(
    doc.Page("speed", "bert", ["sst2"], "2026-07-01T12:00:00+00:00", "qdqbench bench", "bench.json", {}),
    [
        doc.Section(
            "speed",
            "Speed of `x`",
            [
                "Run `a|b` *now*.",
                doc.Prose("only seen on a screen", "bad", doc.SCREEN),
                TABLE,
                doc.Fold("More", [doc.Pairs([("seed", "7")], "settings"), doc.Bullets(["a fault"], "bad")]),
                doc.Columns([[doc.Chart(lambda: "<svg></svg>")], [doc.Chart(lambda: "")]]),
                doc.Code("a: 1", "yaml", doc.TEXT),
            ],
            "good",
        ),
        doc.Section("layers", "Layers", [doc.Prose("only on the page", on=doc.PAGE)], on=doc.PAGE),
    ],
    verdict=doc.Verdict("unclear", "Too few samples", "INT8 is `fast`", ["it failed"], ["it is open"]),
    tiles=[doc.Tile("speed", "0.9x", "over `FP16`", "bad")],
    warnings=[f"warning {number}" for number in range(6)],
    notes=["a note"],
)


def test_markdown_keeps_texts_as_they_are_and_says_states_by_signs():
    text = render_markdown(REPORT)
    assert text.startswith(
        "# bert · sst2\n\n**? Too few samples.** INT8 is `fast`\n\n- ✗ **it failed**\n- it is open\n"
    )
    assert "\n## Speed of `x` ✓\n\nRun `a\\|b` \\*now\\*.\n\n| name | ms | remark |\n|---|--:|---|\n" in text
    assert (
        "\n| `layer.0` (chosen) | 1.50 | |\n| &lt;b&gt;\\|x\\| | **0.90x ✗** (slower) | ✓ |\n| mean | 2 | |\n"
        in text
    )
    assert (
        "\n### More\n\n| settings | |\n|---|---|\n| seed | 7 |\n\n- ✗ a fault\n\n```yaml\na: 1\n```\n" in text
    )
    assert "- warning 5\n" in text
    for absent in ("only", "third", "svg", "Layers"):
        assert absent not in text


def test_a_page_holds_states_as_classes_and_escapes_everything():
    text = render_html(REPORT)
    assert '<section class="verdict is-unclear" id="verdict">\n<h2>? Too few samples</h2>' in text
    assert '<b class="bad">0.9x ✗</b><span>over <code>FP16</code></span>' in text
    assert '<td class="num bad">0.90x ✗ <span class="soft small">slower</span></td>' in text
    assert '<td class="num" data-sort="1.5">1.50</td>' in text
    assert '<td class="bad" colspan="2">failed: *why* ✗</td>' in text
    assert '<th scope="row">&lt;b&gt;|x|</th>' in text
    assert 'data-tip="why"><span class="good" role="img" aria-label="holds">✓</span></td>' in text
    assert '<a href="#speed">Speed of x</a><a href="#layers">Layers</a><a href="#again">' in text
    assert "only on the page" in text
    assert text.count('<div class="plot">') == 1
    assert "only seen on a screen" not in text


def test_a_terminal_shows_what_is_for_it_and_the_first_remarks():
    stream = StringIO()
    Console(file=stream, width=80).print(render_screen(REPORT))
    text = stream.getvalue()
    assert text.startswith("bert · sst2\n╭─ Too few samples ─")
    lines = [line.rstrip() for line in text.splitlines()]
    assert "name     ms" in lines
    assert "layer.0  1.5" in lines
    assert "<b>|x|   0.90x ✗" in lines
    assert "only seen on a screen" in lines
    assert "warning: and 3 more in the report" in lines
    assert lines[-1] == "note: a note"
    assert "seed" not in text


def test_neither_file_is_written_where_a_chart_fails(tmp_path):
    def fail():
        raise ValueError("no chart")

    broken = doc.Report(REPORT.page, [doc.Section("a", "A", [doc.Chart(fail)])])
    with pytest.raises(ValueError, match="no chart"):
        write_report(broken, tmp_path, "a")
    assert [*tmp_path.iterdir()] == []
    assert [path.name for path in write_report(REPORT, tmp_path, "b")] == ["b.md", "b.html"]
