"""The script behind the measured tables asks for what exists, and says what it leaves out."""

import itertools
import sys
from pathlib import Path

import pytest
from tools import measure_tables
from tools.measure_tables import REAL, Step, chunks, main, name_run, runs, write_squad_lengths

from qdqbench.quantize.models.load import load_tokenizer
from qdqbench.quantize.recipe.schema import family_free_recipes, shipped_recipes
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.task import get_task

from ...support.commands import COMMANDS

# writes the file that its first argument names into --out
CHILD = """
import pathlib, sys
out = pathlib.Path(sys.argv[-1])
out.mkdir(parents=True, exist_ok=True)
(out / sys.argv[1]).write_text("[]")
raise SystemExit(int(sys.argv[2]))
"""


@pytest.fixture
def known(tmp_path):
    found = chunks(Path("models"), "glue", tmp_path)
    asked = "runs:minilm-l6:sst2:cuda", "qat:minilm-l6:sst2:openvino"
    return found | {name: runs(name, Path("models"), "glue") for name in asked}


def test_every_command_and_option_and_recipe_exists(known, tmp_path):
    for step in (step for steps in known.values() for step in steps):
        name, *rest = step.command
        options = {
            option
            for parameter in COMMANDS[name,].params
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


def test_results_are_kept_and_a_failure_is_the_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure_tables, "PROGRAM", (sys.executable, "-c", CHILD))
    steps = {
        "good": [Step("done", "bench.json", ["bench.json", "0"]), Step("gate", "a.json", ["a.json", "2"])],
        "bad": [Step("failed", "a.json", ["a.json", "1"]), Step("last", "a.json", ["a.json", "0"])],
    }
    monkeypatch.setattr(measure_tables, "chunks", lambda *_: steps)
    words = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert (main(["good", *words]), main(["bad", *words])) == (0, 1)
    assert [folder.name for folder in sorted((tmp_path / "out").iterdir())] == ["done", "gate", "last"]
    told = "done: measured\ngate: measured\nfailed: left out\nlast: measured\n"
    assert capsys.readouterr().out == told


def test_the_list_and_unknown_chunks(capsys):
    assert main(["--list"]) == 0
    assert "bench: bert-base, bert-base-384" in capsys.readouterr().out
    for name in ("bsae", "runs:minilm-l6"):
        with pytest.raises(SystemExit):
            main([name])
        assert f"no chunk is called {name}" in capsys.readouterr().err
