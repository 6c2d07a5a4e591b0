"""Under which licence a model says it is."""

import re
from pathlib import Path

import yaml

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.files import read_bounded
from qdqbench.quantize.encoders.identity import model_commit
from qdqbench.quantize.encoders.pooling import model_file
from qdqbench.quantize.machine.quiet import quiet

MOST = 1 << 20  # bytes of a model card


def find_licence(name: str, revision: str | None) -> str | None:
    """What the head of a model's card (README.md) names; None where it says nothing, or there is no card."""
    try:
        with quiet("transformers"):
            card = model_file(name, "README.md", model_commit(name, revision))
        text = read_bounded(Path(card), MOST, "a model card", "another") if card else ""
        head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        told = yaml.safe_load(head[1]) if head else None
    except (OSError, UserError, yaml.YAMLError):  # also where the hub cannot be asked
        return None
    found = told.get("license_name", told.get("license")) if isinstance(told, dict) else None
    return " ".join(str(found).split())[:100] if found else None
