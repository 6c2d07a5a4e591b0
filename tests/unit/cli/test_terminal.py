"""What a command says when it stops."""

from qdqbench.cli import terminal
from qdqbench.cli.answer import Answer
from qdqbench.quantize.utils.schema import Strict

SENTENCE = "no recipe is called 'int-8'; `qdqbench recipes list --model my-model` lists those that there are"


def test_an_error_breaks_between_words_and_in_no_command(monkeypatch, capsys):
    monkeypatch.setattr(terminal.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    terminal.complain(SENTENCE)
    said = capsys.readouterr().err
    lines = said.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    assert " ".join(lines) == f"qdqbench: {SENTENCE}"
    assert "`qdqbench recipes list --model my-model`" in said


def test_an_error_is_one_line_of_a_log(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    terminal.complain(SENTENCE)
    assert capsys.readouterr().err == f"qdqbench: {SENTENCE}\n"


def test_a_terminal_obeys_no_foreign_text(capsys):
    terminal.complain("a\x1b]0;pwned\x07\x1b[2Jx")
    assert capsys.readouterr().err == "qdqbench: a?]0;pwned??[2Jx\n"
    Answer(Strict(), "summary\n", ["page: c[/red]\x1b[2J"]).show(json=False)
    assert capsys.readouterr().out == "summary\npage: c[/red]?[2J\n"
