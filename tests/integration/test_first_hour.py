"""The first hour with a model and a CSV file of one's own, as docs/start.md leads through it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

OWN = ["--task", "reviews", "--text-column", "text", "--label-column", "rating", "--num-labels", "2"]


def write_reviews(data: Path, target: Path) -> list[str]:
    """One file with semicolons and labels that are texts; returns its texts."""
    parts = [pandas.read_parquet(path) for path in sorted((data / "sst2").glob("*.parquet"))]
    rows = pandas.concat(parts)
    rows["rating"] = rows.label.map({0: "bad", 1: "good"})
    rows = rows.rename(columns={"sentence": "text"})[["text", "rating"]]
    rows.to_csv(target, index=False, sep=";")
    return list(rows.text)


@pytest.mark.long
def test_no_step_of_the_first_hour_is_a_dead_end(qdqbench, sst2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my-model").symlink_to(sst2.model)
    texts = write_reviews(sst2.data, Path("reviews.csv"))
    given = ["--model", "my-model", "--data", "reviews.csv", *OWN]

    listed = qdqbench("recipes", "list", "--model", "my-model", "--json")
    assert listed.code == 0
    names = [row["recipe"] for row in json.loads(listed.out)["recipes"]]
    assert {"bert-int8-linears", "bert-int8-ffn"} <= {*names}

    folders = []
    for recipe in ("int8-linears", "int8-ffn"):
        done = qdqbench("run", recipe, *given, "--backend", "onnxruntime")
        assert done.code in (0, 2), done.err  # 2: so few samples cannot tell
        assert "semicolons" in done.out
        assert "numbered bad = 0, good = 1" in " ".join(done.out.split())
        report = Path(re.search(r"report: (\S+)", done.out)[1])
        assert report.is_file()
        folders.append(report.parent)
        tried = shlex.split(re.search(r"try it: python (.*)", done.out)[1])
        answered = subprocess.run(
            [sys.executable, *tried[:1], texts[0]], capture_output=True, text=True, check=True
        )
        assert json.loads(answered.stdout)["label"] in ("bad", "good")
    assert len({*folders}) == 2  # the second run is beside the first

    compared = qdqbench("compare", *folders)
    assert compared.code == 0, compared.err
    assert Path(re.search(r"page: (\S+)", compared.out)[1]).is_file()
    for command in ("check", "inspect"):
        looked = qdqbench(command, folders[0])
        assert (looked.code, looked.err) == (0, "")
    written = qdqbench("deploy", folders[0], "elsewhere")
    assert written.code == 0, written.err
    assert (Path("elsewhere") / "README.md").is_file()
