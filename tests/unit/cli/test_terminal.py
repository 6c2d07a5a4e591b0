"""What a command says when it stops; and passwords, which reach no file and no screen."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.cli import terminal
from qdqbench.cli.answer import Answer
from qdqbench.quantize.utils.names import hide_credentials
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


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:hunter2@host:5432/db",
        "postgresql+psycopg2://user:hunter2@host/db",
        "mysql://user:p@ss/hunter2@host/db",
        "mysql://:hunter2@host/db",
        "https://hunter2@host/path",
        "postgresql://host/db?user=me&password=hunter2",
        "postgresql://me:hunter2@host/db?sslpassword=hunter2&sslmode=require",
        "https://host/path?access_token=hunter2",
        "mssql+pyodbc:///?odbc_connect=SERVER%3Dhost%3BUID%3Dsa%3BPWD%3Dhunter2%3BEncrypt%3Dyes",
        "mssql+pyodbc:///?odbc_connect=Pwd%3Dhunter2%3BServer%3Dhost",
    ],
)
@pytest.mark.parametrize("words", ["--storage {}", "--storage={}", "{}", "--data x --storage {} --json"])
def test_no_password_of_a_url_reaches_the_command_line_that_is_stored(url, words, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/qdqbench", "search", *words.format(url).split()])
    said = terminal.command_line()
    assert "hunter2" not in said
    assert "host" in said
    assert len(shlex.split(said)) == 2 + len(words.split())


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////home/me@work/study.db",
        "https://host/path@v1",
        "https://host:8080/path",
        "--data=hub:nyu-mll/glue:sst2@a1b2c3",
        "postgresql://host/db?sslmode=require",
    ],
)
def test_what_holds_no_password_stays(text):
    assert hide_credentials(text) == text


@given(user=st.from_regex(r"[a-z]{0,8}", fullmatch=True), password=st.text(min_size=1))
def test_any_password_is_hidden(user, password):
    assert hide_credentials(f"postgresql://{user}:{password}@host/db") == "postgresql://***@host/db"
