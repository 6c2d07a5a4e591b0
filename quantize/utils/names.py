"""Names, numbers and URLs in messages."""

import re
import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

DEFAULT_RECIPE = "int8-linears"  # of the model's family, where nothing is known of the machine
DEFAULT_QAT = "int8-attention-qat"
SECOND = "_mm"  # ends the name of a metric on the second evaluation split: MNLI's mismatched one
MAX_NAMED = 12  # offenders named in one sentence before "and N more"


def clean(text: str) -> str:
    """Return text without what a terminal would obey."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def name_list(names: Iterable[str], most: int = MAX_NAMED) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def without_formula(value: Any) -> Any:
    """Return a cell of a CSV file; a text that a spreadsheet would compute gets an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value[:1] in {*"=+-@\t\r"} else value


COMPUTES_WITH = ("torch", "modelopt", "accelerate", "optuna", "onnxscript")  # of the extra `quantize`


def install_command(extra: str) -> str:
    """Return the command that installs an extra's libraries, from whatever qdqbench was installed."""
    try:
        wanted = [text.partition(";") for text in requires("qdqbench") or ()]
    except PackageNotFoundError:
        wanted = []
    needs = [need.strip() for need, _, when in wanted if re.fullmatch(rf"\s*extra == .{extra}.\s*", when)]
    return shlex.join(["pip", "install", *(needs or [f"qdqbench[{extra}]"])])


# user and password of a URL, up to the last @: a password may hold any character, an @ and a / too
_USER = re.compile(r"(?<=://)(?:[^/?#:@\s]*:.*|[^/?#@\s]+)@", re.DOTALL)
# parameters of a URL, and those of a connection string inside one of them, which are percent-encoded
_PARAMETER = re.compile(
    r"((?:[?&;=]|%3B|%26)(?:\s|\+|%20)*(?:\w*password|passwd|pwd|\w*token|\w*secret)(?:=|%3D))"
    r"(?:(?!%3B|%26)[^&;\s'\"])+",
    re.IGNORECASE,
)


def hide_credentials(text: str) -> str:
    """Replace what stands before the host of each URL, and passwords among its parameters, by ***.

    A text with several URLs may lose what stands between them: too much is hidden rather than too little.
    """
    return _PARAMETER.sub(r"\1***", _USER.sub("***@", text))
