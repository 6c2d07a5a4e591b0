"""What holds for every report: a page is one offline file that runs nothing, and Markdown stays whole."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from io import StringIO

from rich.console import Console

from qdqbench.quantize.report.render import render_screen

HOSTILE = "<script>alert(1)</script> | `x` ](javascript:1) $\\frac{ {{7*7}} \x1b[31m \u202e [red]"


class Page(HTMLParser):
    """Tags that fetch something, scripts, and tags left open."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.open = []
        self.addresses = []
        self.ids = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"event handler {name}"
            if name in {"src", "href", "xlink:href", "srcset", "data", "action"}:
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def offline(html):
    """A page that asks for nothing, and runs nothing but what sorts its tables."""
    page = Page(html)
    assert not page.open
    assert all(address.startswith("#") for address in page.addresses)
    assert page.tags.count("script") == 1
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"@import|url\((?!#)", html)
    assert not {"\x1b", "\u202e"} & set(html)
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)
    return page


def plain(markdown):
    """Tables of a Markdown file in which all of others stays text, each with as many cells in every line."""
    outside_fences = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", markdown)
    assert "<script" not in re.sub(r"`[^`\n]*`", "code", outside_fences)
    assert not {"\x1b", "\u202e"} & set(markdown)
    tables = re.findall(r"(?m)(?:^\|.*\n)+", markdown)
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table[:300]
    return tables


def on_terminal(report, width=80):
    """What a terminal shows of a report, without its colors."""
    stream = StringIO()
    Console(file=stream, width=width, force_terminal=True, color_system=None).print(render_screen(report))
    return stream.getvalue()
