"""The picture of the README: of a measured run's page, and small."""

import json

import pytest
from tools.make_picture import BENCH, HEIGHT, ROOT, WIDTH, write_page

PNG, MOST_BYTES = b"\x89PNG\r\n\x1a\n", 200_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pictures_are_there_and_small(scheme):
    picture = (ROOT / "docs" / "pictures" / f"report-{scheme}.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) < MOST_BYTES
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    assert (width, height) == (WIDTH, HEIGHT)


def test_the_page_is_of_the_measured_run_with_its_bench(tmp_path):
    page = write_page(tmp_path).read_text(encoding="utf-8")
    assert "minilm-l6-sst2" in page
    assert "Gate passed" in page
    cells = [cell["headline"]["cpu"]["value"] for cell in json.loads(BENCH.read_text())["configs"]]
    assert any(f"{value:.2f}x" in page for value in cells)
