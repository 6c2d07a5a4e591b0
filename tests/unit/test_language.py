"""The language of docs, help texts and docstrings: the field's words, in sentences that are read once."""

import ast
import inspect
import io
import json
import re
import tokenize
from itertools import groupby

import pytest
from tools import pages

from ..support.commands import COMMANDS
from ..support.prose import DOCUMENTS, NOTEBOOKS, ROOT, read_prose

PAGES = [*DOCUMENTS, *NOTEBOOKS]
MODULES = [path for top in ("quantize", "eval", "api") for path in (ROOT / top).rglob("*.py")]
INSTEAD = {
    r"beside": "next to, alongside, as well as",
    r"anew": "again, from scratch",
    r"mend(s|ed)?": "fix",
    r"goes? on": "resume, continue",
    r"held to": "checked against, compared with",
    r"behind (the|a|an) (next |INT8 )?(GEMM|GELU|DQ|\w+Linear|LayerNorm|MatMul|attention|linear)": "after",
    r"(behavi|col|fav|neighb)our\w*|cent(red?|res|ring)|licence|learnt|artefacts?|judgements?|grey|whilst|"
    r"analys(e[ds]?|ing)|(un)?(label|model|cancel|travel|signal)l(ed|ing)|"
    r"(normal|recogn|optim|serial|initial|summar|organ|minim|maxim|general|real|synchron|token|visual|random|"
    r"special|standard|vector|parallel|neutral|custom|quant|util)is(e[drs]?|ing|ation)": "American spelling",
}
ON_PAGES = INSTEAD | {  # in what is written by hand; help texts and errors have names of the code in them
    r"contestants?|peers?": "systems, baselines",
    r"linears": "linear layers",
    r"islands?": "FP16 fallback layers",
    r"told apart": "inconclusive, not significant",
    r"judge[sd]?|judging": "evaluate, compare",
    r"answer(s|ed)? otherwise": "changed predictions",
    r"without a word": "silently",
    r"by itself": "alone, unasked",
}
LONGEST, LONGEST_COMMENT = 25, 30  # words of a sentence; of one in a docstring or a comment
OPENERS = ("What", "Whether", "Which", "How", "Where")


def offences(text, instead=INSTEAD):
    """Each private word of a text, with what to write instead; code is left out."""
    prose = re.sub(r"```.*?```|`[^`\n]*`|<!--.*?-->", "", text, flags=re.DOTALL)
    return [
        f"{found.group()!r}: write {better}"
        for word, better in instead.items()
        for found in re.finditer(rf"\b(?:{word})\b", prose)
    ]


def hand_written(text):
    """A page without what tools write: reference bodies and measured tables."""
    text = text.partition(pages.MARK)[0]
    return re.sub(r"<!-- figures:[\w-]+ -->.*?<!-- figures:end -->", "FIGURE", text, flags=re.DOTALL)


def sentences(text):
    """Sentences of a page, without code blocks, tables and headings; a span of code is one word."""
    text = re.sub(r"```.*?```|<!--.*?-->|</?[a-z].*?>", "", text, flags=re.DOTALL)
    text = re.sub(r"^(#.*|\s*\|.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*([-*]|\d+\.|[│ ]*[├└]──) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?:])[\"*)]*\s+", paragraph)


def long_sentences(text, longest=LONGEST):
    """Each sentence with too many words."""
    found = ([word for word in each.split() if re.search(r"\w", word)] for each in sentences(text))
    return [f"{len(words)} words: {' '.join(words)}" for words in found if len(words) > longest]


def docstrings(source):
    """Line and text of every docstring of a function or class."""
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if documented and (text := ast.get_docstring(node)):
            yield node.lineno, text


def texts(source):
    """Line and text of every string of two words or more: no docstring, no regex; N is what is filled in."""
    tree, passed = ast.parse(source), set[ast.AST]()
    for node in ast.walk(tree):  # from the outside to the inside
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            passed |= {*ast.walk(node)}
        elif isinstance(node, ast.JoinedStr) and node not in passed:
            passed |= {*node.values}
            parts = (each.value if isinstance(each, ast.Constant) else "N" for each in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and node not in passed and len(str(node.value).split()) > 1:
            yield node.lineno, str(node.value)


def comments(source):
    """Line and text of every docstring, those of fields too, and of comments: lines in a row are one text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, inspect.cleandoc(str(node.value.value))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = enumerate(token for token in tokens if token.type == tokenize.COMMENT)
    for _, rows in groupby(found, lambda row: (row[1].start[0] - row[0], row[1].start[1])):
        block = [token for _, token in rows]
        yield block[0].start[0], " ".join(token.string.strip("# ") for token in block)


def code_offences(source, read, longest=LONGEST):
    """Private words and long sentences of what `read` reads in a module, each with its line."""
    return [
        f"{line}: {found}"
        for line, text in read(source)
        for found in (*offences(text), *long_sentences(text, longest))
    ]


def helps():
    """Name and text of every help of the command line."""
    for words, command in COMMANDS.items():
        name = " ".join(("qdqbench", *words))
        yield name, command.help or ""
        for each in command.params:
            yield f"{name} {each.name}", getattr(each, "help", None) or ""


def test_a_planted_offence_is_found():
    assert offences("It goes on beside the run, `anew`.") == [
        "'beside': write next to, alongside, as well as",
        "'goes on': write resume, continue",
    ]
    assert offences("The linears are told apart.", ON_PAGES) == [
        "'linears': write linear layers",
        "'told apart': write inconclusive, not significant",
    ]
    assert [*docstrings('def f():\n    """What it is."""')] == [(1, "What it is.")]


def test_a_planted_offence_in_code_is_found():
    long = "word " * 30
    source = f'''"""A page beside it."""
NOTE = f"{{x}} lies " "beside {{y}}"
raise UserError("It goes on, " f"{{a}} centred")
re.match("a colour", row["centred"])  # as is {long}
x = 1  # behind the
# INT8 GEMM
{{"values": "{long}"}}
'''
    assert code_offences(source, texts) == [
        "2: 'beside': write next to, alongside, as well as",
        "3: 'goes on': write resume, continue",
        "3: 'centred': write American spelling",
        f"7: 30 words: {long.strip()}",
    ]
    assert code_offences(source, comments, LONGEST_COMMENT) == [
        "1: 'beside': write next to, alongside, as well as",
        f"4: 32 words: as is {long.strip()}",
    ]
    assert code_offences("# behind the\n# INT8 GEMM\n", comments) == [
        "1: 'behind the INT8 GEMM': write after"
    ]


def test_a_planted_long_sentence_is_found():
    assert long_sentences(f"{'word ' * 25}end. Short: {'word ' * 25}. `a b` c.") == [
        f"26 words: {'word ' * 25}end."
    ]
    assert long_sentences(f"# {'word ' * 30}\n\n| {'word ' * 30} |\n") == []
    assert hand_written("a <!-- figures:x -->b<!-- figures:end --> c") == "a FIGURE c"


def test_a_planted_offence_in_a_notebook_is_found(tmp_path):
    long = "word " * 26
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "It lies beside the run.\n"]},
        {"cell_type": "code", "source": [f"# anew, {long}"]},
        {"cell_type": "markdown", "source": [long]},
    ]
    page = tmp_path / "page.ipynb"
    page.write_text(json.dumps({"cells": cells}))
    text = read_prose(page)
    assert offences(text) == ["'beside': write next to, alongside, as well as"]
    assert long_sentences(text) == [f"26 words: {long.strip()}"]
    assert ROOT / "docs/tutorials/quickstart.ipynb" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_pages_are_short(page):
    assert long_sentences(hand_written(read_prose(page))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_the_words_of_the_field(page):
    text = read_prose(page)
    assert offences(text) == []
    assert offences(hand_written(text), ON_PAGES) == []


def test_help_texts_begin_with_a_noun_or_a_verb():
    assert [f"{name}: {text}" for name, text in helps() if text.split(" ")[0] in ("Of", *OPENERS)] == []
    assert [f"{name}: {found}" for name, text in helps() for found in offences(text)] == []
    assert [f"{name}: {found}" for name, text in helps() for found in long_sentences(text)] == []


@pytest.mark.parametrize(("read", "longest"), [(texts, LONGEST), (comments, LONGEST_COMMENT)])
def test_code_uses_the_words_of_the_field_in_short_sentences(read, longest):
    assert [
        f"{path.relative_to(ROOT)}:{found}"
        for path in MODULES
        for found in code_offences(path.read_text(encoding="utf-8"), read, longest)
    ] == []


def test_docstrings_begin_with_a_noun_or_a_verb():
    assert [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in MODULES
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if text.split()[0] in OPENERS
    ] == []
