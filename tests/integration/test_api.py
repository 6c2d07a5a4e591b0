"""The public Python API: docs/tutorials/python.md runs as it is written, and what it says holds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qdqbench
from qdqbench.eval.bench import systems

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tutorials" / "python.md").read_text()
NOTEBOOK = json.loads((ROOT / "docs" / "tutorials" / "quickstart.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
BLOCK = r"^```python\n(.*?)^```$"
BLOCKS = re.findall(BLOCK, TEXT, re.MULTILINE | re.DOTALL)


def execute(blocks, path):
    """Run blocks one after the other, as a reader does; returns what they left."""
    seen = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{path}, block {number}", "exec"), seen)
    return seen


@pytest.mark.slow
def test_the_readme_and_the_notebook_run_as_they_stand(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(BLOCK, (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    results = execute([block], "README.md")["results"]
    assert capsys.readouterr() == ("", "")  # the API never prints
    assert isinstance(results, qdqbench.Results)
    assert results.stages["fp32"].metrics["accuracy"] > 0.9  # of the built-in BERT
    assert results.stages["fp32"].n >= 1000
    assert results.engine.int8_gemms == len(results.quantized_layers) > 0
    assert (results.parity.passed, results.gate.passed, results.model["embedded"]) == (True, True, True)
    table = results.to_frame()
    done = {name for name, stage in results.stages.items() if stage.status == "done"}
    assert {*table.stage} == done >= {"fp32", "fake_quant", "onnxruntime"}
    accuracy = table[(table.stage == "onnxruntime") & (table.metric == "accuracy")].iloc[0]
    assert accuracy.value == results.stages["onnxruntime"].metrics["accuracy"]
    assert accuracy.delta == results.stages["onnxruntime"].vs_fp32.delta["accuracy"]
    assert qdqbench.evaluate("runs/a").to_frame().equals(table)
    seen = execute(CELLS, "docs/tutorials/quickstart.ipynb")  # its run is finished already
    assert {"fp32", "fake_quant", "onnxruntime"} <= {*seen["accuracy"].stage}
    assert seen["engine"].not_int8 == []
    assert seen["engine"].int8_gemms == seen["engine"].expected_int8_gemms > 0
    assert len(seen["kernels"]) == len(seen["engine"].layers)
    assert not seen["report"].errors
    assert len(seen["scales"]) == len(seen["quantized"].record.quantizers)


@pytest.mark.long  # the types of its calls are checked with those of the package
def test_every_block_of_the_document_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'")
    monkeypatch.chdir(tmp_path)
    quick = [system for system in systems.TABLE if system.kind != "compile"]  # these have tests of their own
    monkeypatch.setattr(systems, "TABLE", quick)
    seen = execute(BLOCKS, "docs/tutorials/python.md")
    assert capsys.readouterr() == ("", "")
    assert {"quantize", "export", "build", "report"} <= {*seen["stages"]}
    assert [*seen["bench"].to_frame().batch.unique()] == [1]
    assert seen["changed"].name == "mine"


@pytest.mark.long
def test_the_notebook_runs_by_itself(tmp_path, monkeypatch):
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'")
    monkeypatch.chdir(tmp_path)
    execute(CELLS, "docs/tutorials/quickstart.ipynb")


def test_the_notebook_keeps_no_outputs():
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_document_names_functions_that_are_there():
    """The reference page, which tests/unit/tools/test_pages.py compares, has all of them."""
    named = set(re.findall(r"\bqdqbench\.(\w+)", TEXT))
    assert len(named) > 8
    assert named <= {*qdqbench.__all__}


def test_the_import_is_instant_and_every_name_is_there():
    code = (
        "import sys, qdqbench\n"
        "heavy = {'torch', 'pydantic', 'numpy', 'pandas', 'onnx', 'typer', 'yaml'} & {*sys.modules}\n"
        "assert not heavy, heavy\n"
        "assert dir(qdqbench) == sorted(qdqbench.__all__)\n"
        "names = ('load_recipe', 'quantize', 'Results', 'UserError')\n"  # the others load more
        "for name in 2 * names: assert callable(getattr(qdqbench, name)), name\n"
        "import qdqbench.cli.app\n"
        "assert callable(qdqbench.quantize) and qdqbench.cli.app.program\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in 2 * qdqbench.__all__:
        assert callable(getattr(qdqbench, name)), name
    with pytest.raises(AttributeError, match="'qdqbench' has no attribute 'quantise'"):
        _ = qdqbench.quantise


def test_a_gate_that_fails_is_in_the_results(a_run, monkeypatch):
    from qdqbench.eval.metrics.results import Gate, GateIssue
    from qdqbench.eval.runs import collect

    failed = Gate(passed=False, max_drop=0.01, issues=[GateIssue(code="recipe", state="failed")])
    monkeypatch.setattr(collect, "judge_gate", lambda session, results: failed)
    results = qdqbench.resume(a_run)
    assert isinstance(results, qdqbench.Results)
    assert results.gate == failed
