"""Every kind of report in a real browser: offline, on a phone, in the dark, by tap and by keyboard."""

from functools import partial
from itertools import pairwise

import pytest

from qdqbench.eval.bench.results import write_bench
from qdqbench.eval.runs.report.report import write_reports
from qdqbench.quantize.report.render import write_report

from ...support.benches import sample_bench
from ...support.long import mark_long
from ...support.reports import REPORTS
from ...support.runs import sample as sample_run


def _run(folder):
    write_bench(folder / "bench.json", sample_bench())
    write_reports(sample_run(), folder)


def _write(kind, folder):
    write_report(REPORTS[kind](), folder, kind)


OTHERS = ("search", "methods", "sensitivity", "bench", "finetune", "auto", "compare")
KINDS = {"report": _run} | {name: partial(_write, name) for name in OTHERS}

# Luminance contrast (WCAG 2.2, 1.4.3) of every element with text of its own against what it lies on.
PALE = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(linear)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = on => {
    for (; on; on = on.parentElement) {
      const colour = parse(getComputedStyle(on).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.body.querySelectorAll("*")].filter(each => !each.closest("svg, script")
      && [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim())).map(each => {
    const [a, b] = [light(parse(getComputedStyle(each).color)), light(ground(each))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), each.textContent.trim().slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5);
}"""


@pytest.fixture(scope="module")
def written(made_once):
    return lambda kind: made_once(f"page-{kind}", KINDS[kind]) / f"{kind}.html"


@pytest.fixture
def opened(browser, written):
    """A page that asks for nothing else and says nothing on the console."""
    asked = []
    said = []
    made = []

    def open_page(kind, width, scheme="light", **more):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme, **more)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        made.append(page)
        page.goto(f"file://{written(kind)}")
        return page

    yield open_page
    for page in made:
        page.close()
    assert said == []
    assert len(asked) == len(made)


LIKE_OTHERS = ("auto", "methods", "compare", "search", "finetune")  # blocks are the report's or the bench's


@pytest.mark.parametrize("kind", mark_long(KINDS, LIKE_OTHERS))
def test_a_page_fits_a_phone_and_can_be_read(kind, opened):
    page = opened(kind, 400, "dark")
    for width in (400, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(PALE) == []
    page.emulate_media(color_scheme="light")
    assert page.evaluate(PALE) == []
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("header .product").inner_text().startswith("qdqbench")
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3')].map(each => Number(each.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.evaluate("[...document.querySelectorAll('svg[role=img]')].every(each => each.ariaLabel)")
    sizes = page.evaluate(
        "[...document.querySelectorAll('svg text')].map(each => each.getBoundingClientRect().height)"
    )
    assert min(sizes, default=9) >= 9  # pixels, at 360
    links = page.locator("nav.contents a")
    assert links.count() == page.locator("section > h2").count() - page.locator("#verdict, #warnings").count()
    for anchor in links.evaluate_all("all => all.map(each => each.getAttribute('href'))"):
        assert page.locator(f"section{anchor} > h2").count() == 1, anchor
    assert page.locator("#again > pre").inner_text().startswith("qdqbench ")


def test_explanations_come_by_tap_and_by_keyboard(opened):
    page = opened("report", 400, has_touch=True)
    cells, tip = page.locator(".grid [data-tip]"), page.locator("#tip")
    assert not tip.is_visible()
    cells.nth(4).tap()
    assert tip.inner_text() == cells.nth(4).get_attribute("data-tip")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.locator("h1").tap()
    assert not tip.is_visible()
    cells.first.focus()
    page.keyboard.press("ArrowRight")
    assert tip.inner_text() == cells.nth(1).get_attribute("data-tip")
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_tables_sort_and_filter(opened):
    page = opened("compare", 1280)
    rows = page.locator("#layers-1 tbody tr")
    column = "#layers-1 tbody td:nth-child(2)"
    before = [float(text) for text in page.locator(column).all_inner_texts()]
    heading = page.locator("#layers-1 thead th").nth(1)
    heading.locator("button").press("Enter")
    assert [float(text) for text in page.locator(column).all_inner_texts()] == sorted(before) != before
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").click()
    assert [float(text) for text in page.locator(column).all_inner_texts()] == sorted(before, reverse=True)
    page.get_by_label("Filter layers").first.fill("layer.1.")
    assert page.locator("#layers-1 tbody tr:visible").count() == 3 < rows.count()
    assert page.get_by_role("status").nth(1).inner_text() == f"3 of {rows.count()}"


def test_numbers_with_units_sort_as_numbers(opened):
    page = opened("sensitivity", 1280)
    column = page.locator("#linears tbody td:nth-child(2)")
    page.locator("#linears thead button").nth(1).click()
    found = [float(text.split(" ")[0].replace("equal", "inf")) for text in column.all_inner_texts()]
    assert found == sorted(found)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_whole_on_paper_and_without_scripts(kind, browser, written):
    context = browser.new_context(java_script_enabled=False, viewport={"width": 400, "height": 800})
    page = context.new_page()
    page.goto(f"file://{written(kind)}")
    assert page.locator("tbody tr").first.is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")
    context.close()
