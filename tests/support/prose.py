"""The pages of the repository, and the text of one: of Markdown, or of the Markdown cells of a notebook."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md")]
DOCUMENTS += DOCS
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


def read_prose(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "markdown")
