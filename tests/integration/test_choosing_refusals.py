"""What the commands that choose a recipe refuse: in one sentence, before anything is written."""

import pytest
import yaml

from qdqbench.quantize.recipe.schema import load_recipe

from .tiny import listing, refused

COMMANDS = {  # each with its recipe, and data left to measure on
    "sensitivity": ("--samples", "16"),
    "compare-calibration": ("--samples", "16"),
    "search": ("--samples", "16", "--trials", "2", "--speed", "int8-share"),
    "auto": ("--samples", "32"),
}
FAST = {"gate": {"min_speedup": 50.0}}
CASES = """
sensitivity:
  - [{calibration: {samples: 256}}, [], 0 are left]
  - [{calibration: {split: validation}}, [], "the judge of task 'sst2'"]
compare-calibration:
  - [{}, [--method, average], "'average'"]
  - [{}, [--smoothing, 2], --smoothing 2]
  - [{}, [--samples, 1], --samples]
  - [{}, [--data, nowhere], data folder nowhere]
  - [{calibration: {samples: 255}}, [], 1 are left]
  - [{calibration: {split: validation}}, [], the judge of task]
  - [bert-fp16, [], nothing into INT8]
search:
  - [{gate: {min_speedup: 50.0}}, [], gate.min_speedup of recipe mine needs a measured latency, 3]
  - [bert-int8-linears, [], calibration.samples] # 512 of 256 rows
  - [{}, [--sensitivity, nowhere.json], nowhere.json]
  - [{}, [--storage, nonsense], give --storage a SQLAlchemy URL]
auto:
  - [{}, [--budget, soon], "--budget soon: no duration"]
  - [{}, [--max-drop, 2], less than or equal to 1]
  - [{}, [--min-speedup, 0], should be greater than 0]
  - [bert-fp16, [], puts nothing into INT8]
  - [int8-linears, [int8-linears], two steps would be called]
"""
TABLE = [(command, *case) for command, cases in yaml.safe_load(CASES).items() for case in cases]
AFTER_LOADING = ("calibration.samples", "needs a measured", "SQLAlchemy")  # the folder is there, and empty


@pytest.fixture
def words(sst2, tmp_path):
    """The words of a command, with a recipe that is changed or named."""

    def make(command, changes, out):
        path = changes
        if not isinstance(changes, str):
            recipe = load_recipe("bert-int8-linears").model_dump(mode="json")
            changed = {"calibration": {"samples": 64}} | changes
            data = recipe | {name: recipe[name] | each for name, each in changed.items()} | {"name": "mine"}
            path = tmp_path / "mine.yaml"
            path.write_text(yaml.safe_dump({"version": 1} | data))
        return [command, path, *sst2.options, "--out", out, *COMMANDS[command]]

    return make


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case[0]} {case[3]}")
def test_what_cannot_be_chosen_from(case, words, qdqbench, tmp_path):
    (command, changes, more, told, *code), out = case, tmp_path / "out"
    refused(qdqbench(*words(command, changes, out), *more), told, code=code[0] if code else 1)
    if any(text in told for text in AFTER_LOADING):
        assert not list(out.glob("*.json"))
    else:
        assert not out.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_folders_of_others_are_left_alone(command, words, qdqbench, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    refused(qdqbench(*words(command, {}, mine)), "other files")
    assert listing(mine) == ["notes.txt"]
    refused(qdqbench(*words(command, {}, mine / "notes.txt")), "is a file")
