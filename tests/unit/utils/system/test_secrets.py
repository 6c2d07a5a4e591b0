"""Passwords never reach a file or the screen."""

import shlex
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.cli.terminal import command_line
from qdqbench.quantize.utils.names import hide_credentials


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
    monkeypatch.setattr(sys, "argv", ["/usr/bin/qdqbench", "search", *words.format(url).split()])
    said = command_line()
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
