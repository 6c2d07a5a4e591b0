"""The license that a model's card names."""

import re
from pathlib import Path

from qdqbench.quantize.core.files import read_bounded
from qdqbench.quantize.encoders.identity import model_commit
from qdqbench.quantize.encoders.pooling import model_file
from qdqbench.quantize.machine.quiet import quiet

MOST = 1 << 20  # bytes of a model card
# a plain value of a line: as YAML, a card from anywhere could expand aliases or hold what its reader fails at
_LINE = re.compile(
    r"^(license|license_name):[ \t]+([\"']?)(\w[^\n\"'#]{0,200})\2[ \t]*(?:#.*)?$", re.MULTILINE
)


def find_license(name: str, revision: str | None) -> str | None:
    """Return the license in the head of a model's card (README.md); None where there is none, or no card."""
    try:
        with quiet("transformers"):
            card = model_file(name, "README.md", model_commit(name, revision))
        text = read_bounded(Path(card), MOST, "a model card", "another") if card else ""
    except Exception:
        return None
    head, end, _ = text.removeprefix("---\n").partition("\n---")
    values = {key: value for key, _, value in _LINE.findall(head)} if end and text.startswith("---\n") else {}
    found = values.get("license_name", values.get("license", ""))
    return " ".join(found.split())[:100] or None
