"""The first hour with a model and a CSV file of one's own, as in docs/tutorials/first-run.md."""

import json
import re
import shlex
from pathlib import Path

import pandas
import pytest
from onnxruntime.quantization import quantize_dynamic

from qdqbench.quantize.deployment.opened import Answering

from ..support.deployed import answers
from .tiny import call_apart, ended, fine, refused, results

COLUMNS = ["--text-column", "Review", "--label-column", "Verdict"]


def write_reviews(data, target, names):
    """One file with semicolons, columns of its own and labels that are texts; returns its texts."""
    parts = [pandas.read_parquet(path) for path in sorted((data / "sst2").glob("*.parquet"))]
    rows = pandas.concat(parts)
    rows["Verdict"] = rows.label.map(dict(enumerate(names)))
    rows = rows.rename(columns={"sentence": "Review"})[["Review", "Verdict"]]
    rows.to_csv(target, index=False, sep=";")
    return list(rows.Review)


def flat(text):
    """Without the frames and breaks of a terminal."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def desk(sst2, tmp_path, monkeypatch):
    """A folder with `my-model` and `reviews.csv`; the texts of the latter."""
    monkeypatch.chdir(tmp_path)
    Path("my-model").mkdir()
    for path in sst2.model.iterdir():
        (Path("my-model") / path.name).symlink_to(path)
    return write_reviews(sst2.data, Path("reviews.csv"), ("bad", "good"))


LIGHT = """
import importlib.machinery, sys
from qdqbench.cli.app import program
from qdqbench.quantize.utils.names import COMPUTES_WITH
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = staticmethod(
    lambda name, *rest: None if name.partition(".")[0] in COMPUTES_WITH else find(name, *rest)
)
program()
"""


def compare_without_torch(folders, given):
    """The page of `compare` where the extra `quantize` is not installed, which `run` then asks for."""

    asked = call_apart("run", *given, *COLUMNS, "--out", "another", code=LIGHT)
    refused(asked, r"this needs \w+, which is not installed; `pip install ", code=3)
    shown = fine(call_apart("compare", *folders, code=LIGHT)).out
    return Path(re.search(r"page: (\S+)", shown)[1]).read_text()


@pytest.mark.slow
def test_no_step_of_the_first_hour_is_a_dead_end(qdqbench, desk, tmp_path):
    texts, blocked = desk, tmp_path / "blocked"
    given = ["--model", "my-model", "--data", "reviews.csv"]

    listed = qdqbench("recipes", "list", "--model", "my-model", "--json")
    assert listed.code == 0
    names = [row["recipe"] for row in json.loads(listed.out)["recipes"]]
    assert {"bert-int8-linears", "bert-int8-ffn"} <= {*names}

    shown = qdqbench("recipes", "show", "int8-linears", "--model", "my-model")
    assert shown.out == qdqbench("recipes", "show", "bert-int8-linears").out != ""

    # mistakes: each is told with what to write instead, and none leaves a folder
    refused(qdqbench("run", "int8-linear", *given, *COLUMNS), "nearest is 'int8-linears'")
    wrong = ["--text-column", "review", "--label-column", "Verdict"]
    refused(qdqbench("run", "int8-linears", *given, *wrong), "nearest: Review", "--text-column")
    refused(qdqbench("run", "int8-linears", *given[2:], *COLUMNS), "--model")
    refused(qdqbench("run", "int8-linears", *given), "no column text, label; its columns are Review, Verdict")
    assert not Path("runs").exists()

    folders, made = [], []
    for recipe in ("int8-linears", "int8-ffn"):
        done = qdqbench("run", recipe, *given, *COLUMNS, "--backend", "onnxruntime")
        assert done.code in (0, 2), done.err  # 2: so few samples cannot tell
        assert max(map(len, done.out[: done.out.index("report: ")].splitlines())) <= 80
        for words in ("has semicolons", "is one file:", "numbered bad = 0, good = 1", "Speed:"):
            assert words in flat(done.out), words
        report = Path(re.search(r"report: (\S+)", done.out)[1])
        assert "my-model" in report.read_text()
        folders.append(report.parent)
        script, *_ = shlex.split(re.search(r"try it: \S+ (.*)", done.out)[1])
        made += answers(Path(script).resolve(), blocked, texts[0])
        assert made[-1]["label"] in ("bad", "good")
    names = ("int8-linears", "int8-ffn")
    assert [folder.name for folder in folders] == [f"my-model-bert-{name}-reviews" for name in names]

    another = qdqbench("run", "int8-ffn", *given, *COLUMNS, "--out", folders[0])
    refused(another, "recipe bert-int8-linears", "another --out", "--overwrite")

    assert Answering.of(folders[0]).told["labels"] == ["bad", "good"]  # as in the report and in deploy/
    assert "LABEL_" not in compare_without_torch(folders, given)
    for command in ("check", "inspect"):
        looked = fine(qdqbench(command, folders[0]))
    shown = qdqbench("report", folders[0], "--json")
    assert json.loads(shown.out)["recipe"]["name"] == "bert-int8-linears"
    measured = qdqbench("evaluate", folders[0], "--json")
    assert {"fp32", "fake_quant", "onnxruntime"} <= {*json.loads(measured.out)["stages"]}

    foreign = Path("dynamic.onnx")  # a file of another tool
    quantize_dynamic(str(folders[0] / "model.fp32.onnx"), str(foreign))
    looked = qdqbench("check", foreign)
    assert looked.code == 2
    assert "none of it runs in INT8" in flat(looked.out)
    assert f"qdqbench fix {foreign}" in flat(looked.out)

    written = qdqbench("deploy", folders[0], "--out", "elsewhere")
    assert written.code == 0, written.err
    assert (Path("elsewhere") / "README.md").is_file()
    assert answers(Path("elsewhere/run_onnxruntime.py").resolve(), blocked, texts[0]) == made[:1]


@pytest.mark.slow
@pytest.mark.long
def test_labels_in_another_order_than_the_models_are_told_and_mended(qdqbench, sst2, desk):
    """Texts that sort otherwise than the model's classes: the verdict names `id2label`, which mends it."""
    write_reviews(sst2.data, Path("reviews.csv"), ("schlecht", "gut"))  # 0 and 1; sorted they are 1 and 0
    asked = ["run", "int8-linears", "--model", "my-model", "--data", "reviews.csv", *COLUMNS]
    asked += ["--backend", "onnxruntime"]
    done = ended(qdqbench(*asked), 2)
    said = flat(done.err)
    assert 'write `id2label`: {"0": "schlecht", "1": "gut"} into the model\'s config.json' in said
    assert "stopped after its baseline" in said
    assert "stage 3" not in said

    config = json.loads((sst2.model / "config.json").read_text())
    config["id2label"] = {"0": "schlecht", "1": "gut"}
    config["label2id"] = {"schlecht": 0, "gut": 1}
    (Path("my-model") / "config.json").unlink()
    (Path("my-model") / "config.json").write_text(json.dumps(config))
    again = qdqbench(*asked)
    assert again.code in (0, 2)
    assert "numbered schlecht = 0, gut = 1" in flat(again.out)
    assert "another order" not in again.out + again.err
    folder = Path(re.search(r"report: (\S+)", again.out)[1]).parent
    assert results(folder)["stages"]["fp32"]["metrics"]["accuracy"] > 0.8
