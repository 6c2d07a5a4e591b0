"""The script behind the measured tables asks for what exists, and says what it leaves out."""

import itertools
import sys
import time
from pathlib import Path

import pytest
import typer
from tools import measure_tables
from tools.measure_tables import LATE, REAL, Step, chunks, main, measure, name_run, runs, write_squad_lengths

from qdqbench.cli.app import app
from qdqbench.quantize.models.load import load_tokenizer
from qdqbench.quantize.recipe.schema import family_free_recipes, shipped_recipes
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.task import get_task

# writes the file that its first argument names into --out, after the seconds of its second
CHILD = """
import pathlib, sys, time
out = pathlib.Path(sys.argv[-1])
out.mkdir(parents=True, exist_ok=True)
(out / sys.argv[1]).write_text("[]")
time.sleep(float(sys.argv[2]))
raise SystemExit(int(sys.argv[3]))
"""


@pytest.fixture
def known(tmp_path):
    found = chunks(Path("models"), "glue", tmp_path)
    asked = "runs:minilm-l6:sst2:cuda", "qat:minilm-l6:sst2:openvino"
    return found | {name: runs(name, Path("models"), "glue") for name in asked}


def test_every_command_and_option_and_recipe_exists(known, tmp_path):
    commands = typer.main.get_command(app).commands
    for step in (step for steps in known.values() for step in steps):
        name, *rest = step.command
        options = {
            option
            for parameter in commands[name].params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {part for part in rest if part.startswith("--")} <= options, step
        asked = [
            after for before, after in itertools.pairwise(rest) if before in ("--recipe", "--extra-recipe")
        ]
        asked += itertools.takewhile(lambda word: not word.startswith("--"), rest)
        assert asked
        finished = {each for each in asked if Path(each).parent == Path("models")}
        assert {Path(each).name for each in finished} <= {name_run(*run) for run in REAL}
        assert set(asked) - finished <= {*shipped_recipes(), *family_free_recipes()}, step


def test_made_up_rows_have_the_lengths_of_squad(tiny_bert, tmp_path):
    tokenizer = load_tokenizer(str(tiny_bert))
    folder = write_squad_lengths(tmp_path, tiny_bert)
    rows = load_split(get_task("sst2"), str(folder), "validation")
    lengths = encode(rows, get_task("sst2"), tokenizer, 384).lengths
    assert len(lengths) == 1024
    assert (lengths.min() >= 30, lengths.max()) == (True, 384)
    assert abs(lengths.mean() - 177) < 0.5


def test_results_are_named_once(known):
    names = [(step.file, step.name) for steps in known.values() for step in steps]
    assert len(set(names)) == len(names)


def test_results_are_kept_and_what_is_not_done_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_tables, "PROGRAM", (sys.executable, "-c", CHILD))
    monkeypatch.setattr(measure_tables, "GRACE_S", 1.0)
    steps = [
        Step("done", "bench.json", ["bench.json", "0", "0"]),
        Step("gate", "results.json", ["results.json", "0", "2"]),
        Step("failed", "results.json", ["results.json", "0", "1"]),
        Step("slow", "results.json", ["other.json", "30", "0"]),
        Step("late", "results.json", ["results.json", "0", "0"]),
    ]
    lines = list(measure(steps, tmp_path / "work", tmp_path / "out", time.monotonic() + 1.5))
    assert [line.split(":")[0] for line in lines] == [step.name for step in steps]
    assert [folder.name for folder in sorted((tmp_path / "out").iterdir())] == ["done", "gate"]
    assert "exit status 1" in lines[2]
    assert "it did not end in time" in lines[3]
    assert "no time is left" in lines[4]
    assert LATE not in (0, 1, 2)


def test_benches_are_prepared_once_and_timed_later(tmp_path, monkeypatch):
    steps = [Step(name, "bench.json", ["bench.json", "0", "0"]) for name in ("one", "two")]
    monkeypatch.setattr(measure_tables, "PROGRAM", (sys.executable, "-c", CHILD))
    monkeypatch.setattr(measure_tables, "chunks", lambda *_: {"some": steps})
    prepared = []
    prepare = measure_tables.prepare
    monkeypatch.setattr(measure_tables, "prepare", lambda *given: prepared.append(1) or prepare(*given))
    words = ["some", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert main([*words, "--build-only"]) == 0
    assert (len(prepared), (tmp_path / "out").exists()) == (1, False)
    assert main(words) == 0
    assert len(prepared) == 1
    assert [folder.name for folder in sorted((tmp_path / "out").iterdir())] == ["one", "two"]


def test_the_list_and_unknown_chunks(capsys):
    assert main(["--list"]) == 0
    assert "bench: bert-base, bert-base-384" in capsys.readouterr().out
    for name in ("bsae", "runs:minilm-l6"):
        with pytest.raises(SystemExit):
            main([name])
        assert f"no chunk is called {name}" in capsys.readouterr().err
