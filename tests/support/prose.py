"""The text of a page: of a Markdown file, or of the Markdown cells of a notebook."""

import json


def read_prose(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "markdown")
