"""The programs of the page cover every library, and a library that differs is not passed."""

import ast
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tools import consumers
from tools.consumers import PAGE, Block, compare, program, read_blocks

ANSWERS = [[{"label": "good", "score": 0.9}, {"label": "bad", "score": 0.1}]] * 2


def test_the_page_has_a_program_for_each_library_and_kind(tmp_path):
    blocks = [*read_blocks(PAGE.read_text())]
    assert sorted((each.environment, each.name) for each in blocks) == [
        ("fastembed", "embed-int8"),
        ("js", "embed-int8"),
        ("js", "sst2-int8"),
        ("onnx", "embed-int8"),
        ("onnx", "sst2-int8"),
        ("onnx", "stsb-int8"),
        ("openvino", "embed-int8"),
        ("openvino", "sst2-int8"),
        ("openvino", "stsb-int8"),
    ]
    for block in blocks:
        code = program(block, tmp_path / "a", tmp_path / "texts.json", tmp_path / "out.json")
        assert f"{tmp_path / 'a'}" in code
        assert "gripping" not in code
        assert "man eats" not in code
        if block.environment != "js":
            ast.parse(code)


def test_a_program_answers_the_texts_that_it_is_given(tmp_path):
    (tmp_path / "texts.json").write_text('["a", "b"]')
    code = 'known = "sst2-int8"\n(lambda texts, more: [known, *texts, more])(["x", "y"], 3)'
    block = Block("onnx", "sst2-int8", "a library", code.replace("known, *texts", "*texts, known"))
    exec(program(block, tmp_path / "run", tmp_path / "texts.json", tmp_path / "out.json"), {})
    assert json.loads((tmp_path / "out.json").read_text()) == ["a", "b", str(tmp_path / "run"), 3]


@pytest.mark.parametrize(
    ("answers", "same"),
    [
        (ANSWERS, True),
        ([ANSWERS[0], [{"label": "bad", "score": 0.9}, {"label": "good", "score": 0.1}]], False),
    ],
)
def test_other_answers_are_seen(tmp_path, monkeypatch, answers, same):
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "model.json").write_text(json.dumps({"labels": ["bad", "good"]}))
    (tmp_path / "results.json").write_text(json.dumps({"engine": None}))
    (tmp_path / "logits").mkdir()
    logits = {"validation.logits": np.log([[0.1, 0.9], [0.1, 0.9]])}
    np.savez(tmp_path / "logits" / "onnxruntime.npz", **logits)
    kind = SimpleNamespace(name="classification")
    task = SimpleNamespace(kind=kind, eval_splits=["validation"], text_columns=["text"])
    split = SimpleNamespace(dataset={"text": ["a", "b"]})
    session = SimpleNamespace(config=SimpleNamespace(task=task), eval_splits={"validation": (split, None)})
    monkeypatch.setattr(consumers, "read_config", lambda run: None)
    monkeypatch.setattr(consumers, "Session", lambda config, run: session)
    monkeypatch.setattr(consumers, "ask", lambda block, folder, texts: answers)
    assert {right for _, _, right in compare(tmp_path)} == {same}
    monkeypatch.setattr(consumers, "ask", lambda block, folder, texts: "ImportError: no library")
    assert {found[1:] for found in compare(tmp_path)} == {("ImportError: no library", False)}
