"""Each way to ask a run gives the answers that it was evaluated with: scripts, a server, Triton, files."""

import json
import shutil
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from qdqbench.quantize.deployment.triton import export_triton
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.utils.system.cpu import find_cpu

from ..support.deployed import answers, run_script
from ..support.triton_stub import Loaded
from .brought import PASSAGES
from .served import ask, evaluated, line_of, rows_of, value_of, with_cpu_engine
from .tiny import call_alone, fine

pytestmark = pytest.mark.slow


def by_script(run, count, tmp_path, runtime="onnxruntime"):
    """From elsewhere, with no run around it; half of the texts are words of the command line."""
    script = shutil.copytree(run / "deploy", tmp_path / "elsewhere") / f"run_{runtime}.py"
    rows, blocked = rows_of(run, count), tmp_path / "blocked"
    words = [text for row in rows[: count // 2] for text in line_of(row).split("\t")]
    lines = map(line_of, rows[count // 2 :])
    return answers(script, blocked, *words) + answers(script, blocked, lines=lines)


def by_openvino(run, count, tmp_path):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'qdqbench[openvino]'")
    if not find_cpu().int8_dot:
        pytest.skip("sums of INT8 saturate on this CPU")
    return by_script(run, count, tmp_path, "openvino")


def by_endpoint(run, count, tmp_path):
    pytest.importorskip("httptools", reason="needs httptools: pip install 'qdqbench[serve]'")
    rows = rows_of(run, count)
    texts, *others = ([*column] for column in zip(*rows, strict=True))
    kind = Session(read_config(run), run).config.task.kind.name
    fields = {
        "token classification": {"sentences": texts},
        "question answering": {
            "questions": [dict(zip(("question", "context"), row, strict=False)) for row in rows]
        },
        "re-ranking": {"query": texts[0], "passages": next(iter(others), [])},
    }
    made = ask(with_cpu_engine(run, tmp_path / "run"), **fields.get(kind, {"texts": texts}))
    if kind == "re-ranking":
        assert [each["score"] for each in made] == sorted((each["score"] for each in made), reverse=True)
        made.sort(key=lambda each: each["index"])
    return made


def by_triton(run, count, tmp_path):
    """In three requests of one batch."""
    export_triton(run / "deploy", tmp_path / "out", "it")
    columns = [*zip(*(line_of(row).split("\t") for row in rows_of(run, count)), strict=True)]
    named = dict(zip(("TEXT", "TEXT_PAIR"), columns, strict=False))
    parts = slice(0, 3), slice(3, 4), slice(4, count)
    requests = ({name: texts[part] for name, texts in named.items()} for part in parts)
    return Loaded(tmp_path / "out" / "models" / "it").answers(*requests)


def by_file(run, count, tmp_path):
    split, _ = next(iter(Session(read_config(run), run).eval_splits.values()))
    given, out = split.dataset.data.table.combine_chunks().slice(0, count), tmp_path / "out.parquet"
    pa.parquet.write_table(given, tmp_path / "rows.parquet")
    served = with_cpu_engine(run, tmp_path / "run")
    fine(call_alone("predict", served, "--data", tmp_path / "rows.parquet", "--out", out))
    made = pa.parquet.read_table(out)
    assert made.column_names[: given.num_columns] == given.column_names
    made = made.drop(given.column_names)
    names = [name.removeprefix("predicted_") for name in made.column_names]
    return made.rename_columns(names).to_pylist()


WAYS = {"script": by_script, "endpoint": by_endpoint, "triton": by_triton, "file": by_file}
ROWS = {"bert-int8-linears": 40, "tokens": 24, "qa": 24, "embed": 8, "rerank": PASSAGES}


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *(
            pytest.param(case, way, marks=pytest.mark.long if case == "rerank" else (), id=f"{case}-{name}")
            for case, (name, way) in product(ROWS, WAYS.items())
        ),
        pytest.param("bert-int8-linears", by_openvino, id="bert-int8-linears-openvino"),
    ],
)
def test_answers_are_those_of_the_evaluation(case, way, whole_run, tmp_path):
    run, exact = whole_run(case), way is by_script
    known, made = evaluated(run, ROWS[case]), [*map(value_of, way(run, ROWS[case], tmp_path))]
    if isinstance(known, np.ndarray):
        np.testing.assert_allclose(made, known, atol=1e-4 if exact else 2e-2)
    else:
        same = [one == other for one, other in zip(made, known, strict=True)]
        assert sum(same) >= len(same) - (not exact)  # an engine rounds otherwise than the graph as exported


def test_words_are_cut_off_and_entities_are_spans(whole_run, tmp_path):
    run, sentences = whole_run("tokens"), [words for (words,) in rows_of(whole_run("tokens"), 24)]
    script = run / "deploy" / "run_onnxruntime.py"
    (long,) = answers(script, tmp_path / "blocked", " ".join(["good"] * 300))
    assert ([word for word, _ in long["words"]], long["words"][-1][1]) == (["good"] * 300, None)
    *made, long = ask(with_cpu_engine(run, tmp_path / "run"), sentences=[*sentences, ["good"] * 300])
    assert (long["truncated"], len(long["labels"]), long["labels"][-1]) == (True, 300, None)
    for each, words in zip(made, sentences, strict=True):
        for entity in each["entities"]:
            span = slice(entity["first"], entity["last"] + 1)
            assert entity["text"] == " ".join(words[span])
            assert {label[2:] for label in each["labels"][span]} == {entity["type"]}
    assert any(each["entities"] for each in made)


def test_contexts_have_windows_and_a_question_needs_one(whole_run, tmp_path):
    run = whole_run("qa")
    rows = [dict(zip(("question", "context"), row, strict=True)) for row in rows_of(run, 24)]
    made = ask(with_cpu_engine(run, tmp_path / "run"), questions=rows)
    assert max(each["tokens"] for each in made) > 32  # of a window
    script = run / "deploy" / "run_onnxruntime.py"
    refused = run_script(script, tmp_path / "blocked", "a question alone")
    told = "give a question and its context, in a line with a tab between\n"
    assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", told)


def test_prompts_are_those_of_the_evaluation(whole_run, tmp_path):
    run, texts = whole_run("embed"), [text for (text,) in rows_of(whole_run("embed"), 8)]
    known, served = evaluated(run, 8), with_cpu_engine(run, tmp_path / "run")
    given = ([f"good {text}" for text in texts], 0, 2e-2), (texts, 0.05, 2)
    for asked, least, most in given:
        made = [each["embedding"] for each in ask(served, texts=asked, prompt="")]
        assert least <= np.abs(np.array(made) - known).max() < most
    page = (run / "deploy" / "README.md").read_text()
    assert "Pooling in the graph: mean, normalized to length 1" in page
    assert "Prompts that were evaluated: `good `" in page
    kept = json.loads((run / "deploy" / "config_sentence_transformers.json").read_text())
    assert kept == {"prompts": {"query": "good ", "document": ""}, "default_prompt_name": None}
