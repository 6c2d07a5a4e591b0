"""Head and foot of the pages that are no document yet."""

import re

from qdqbench.eval.report.document import Page, page_of, page_of_choice

__all__ = ["Page", "contents", "page_of", "page_of_choice"]
_SECTION = re.compile(r'<section\b[^>]*\bid="([^"]+)"[^>]*>\s*<h2>(.*?)</h2>', re.DOTALL)
_MARKUP = re.compile(r"<[^>]+>|[\u2713\u2717\u26a0]")


def contents(body: str) -> list[tuple[str, str]]:
    """Return anchors and headings of the sections of a page, for its table of contents."""
    return [(anchor, _MARKUP.sub("", heading).strip()) for anchor, heading in _SECTION.findall(body)]
