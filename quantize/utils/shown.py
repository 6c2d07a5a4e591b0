"""Results as a notebook shows them: one line, and a small table."""

from html import escape
from typing import Any


class Shown:
    """A result that shows a few facts in place of all that it holds."""

    def facts(self) -> dict[str, Any]:
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return one line."""
        facts = (f"{name}: {value}" for name, value in self.facts().items())
        return f"{type(self).__name__}({', '.join(facts)})"

    def __str__(self) -> str:
        """Return one line too."""
        return repr(self)

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
            for name, value in self.facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"
