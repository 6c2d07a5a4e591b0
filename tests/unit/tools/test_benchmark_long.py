"""The table of docs/explanation/int8-softmax.md is that of its results files."""

import json
from pathlib import Path

from tools.benchmark_long import table

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_holds_the_table_of_its_results():
    files = sorted((DOCS / "measured-long").glob("*.json"))
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    assert [(row["length"], row["form"]) for row in rows] == [
        (length, form) for length in (128, 384) for form in ("fp16", "max", "error")
    ]
    page = (DOCS / "explanation" / "int8-softmax.md").read_text(encoding="utf-8")
    assert page.partition("<!-- table:begin -->\n")[2].partition("<!-- table:end -->")[0] == table(rows)
