"""The command line around the main job: recipes, check, profile, help."""

import json
import os
import re
from pathlib import Path

import onnx
import pytest

from qdqbench.quantize.recipe.schema import dump_recipe, load_recipe, parse_recipe, shipped_recipes

from ..support.commands import COMMANDS
from ..support.families import write_model
from ..support.foreign_layer import write_dynamic, write_static
from .tiny import call_apart, ended, entries, fine, refused, signs_of_life

RECIPES = shipped_recipes()
ROOT = Path(__file__).resolve().parents[2]
ANSI = re.compile(r"\x1b\[")


@pytest.mark.parametrize("path", sorted(COMMANDS), ids=lambda path: "-".join(path) or "qdqbench")
def test_every_command_has_help(path, qdqbench):
    done, node = fine(qdqbench("help", *path)), COMMANDS[path]
    assert "Usage:" in done.out
    assert node.help
    assert hasattr(node, "commands") or re.search(r"Example: qdqbench .*More: docs/", done.out, re.DOTALL)
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.out).split())
    for word in node.help.split()[:4]:
        assert word in shown
    for parameter in node.params:
        told = " ".join((getattr(parameter, "help", None) or "").split())
        assert told in shown, f"help of {parameter.name} is not shown as it is written"


def test_a_list_of_recipes_imports_nothing_heavy_and_has_no_codes():
    heavy = "{'torch', 'transformers', 'datasets', 'onnxruntime', 'modelopt', 'tensorrt_rtx', 'matplotlib'}"
    code = (
        "import sys; from qdqbench.cli.app import main\n"
        "try: main()\n"
        f"finally: sys.exit(sorted({heavy} & {{*sys.modules}}) or None)"
    )
    assert not ANSI.search(fine(call_apart("recipes", "list", code=code)).out)  # as it is no terminal


def test_a_shell_completes_commands_and_recipes(qdqbench, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # CI has none
    assert "_QDQBENCH_COMPLETE=complete_" in fine(qdqbench("--show-completion", "bash")).out
    monkeypatch.setenv("_QDQBENCH_COMPLETE", "complete_bash")
    for typed, expected in {"exp": "export export-triton", "run int8-lin": "int8-linears"}.items():
        words = f"qdqbench {typed}"
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert {*expected.split()} <= {*qdqbench().out.split()}


@pytest.mark.parametrize("arguments", [(), ("recipes",)])
def test_without_a_command_the_help_is_shown(arguments, qdqbench):
    done = qdqbench(*arguments)
    assert "Usage:" in done.out
    assert done.code == 1  # 2 would say that a check does not hold


# Recipes.


def test_recipes_list(qdqbench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = fine(qdqbench("recipes", "list", "--json"))
    rows = json.loads(done.out)["recipes"]
    assert sorted(row["recipe"] for row in rows) == RECIPES
    assert {row["family"]: row["model_types"] for row in rows}["bert"] == ["bert"]
    (first,) = (row for row in rows if "cuda" in row["start_in"] and row["family"] == "bert")
    assert "cuda" in {figure["backends"] for figure in first["figures"]}
    shown = fine(qdqbench("recipes", "list"))
    assert all(re.search(rf"(^|\s){name}[\s.,]", shown.out) for name in RECIPES)
    assert re.search(rf"^\s*{first['recipe']}\s+cuda \*\s+.* ± .*x\s*$", shown.out, re.MULTILINE)
    assert "Not measured: " in shown.out
    assert "…" not in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


def test_recipes_list_of_a_model(qdqbench, tiny_bert, tmp_path):
    fitting = qdqbench("recipes", "list", "--model", tiny_bert, "--json")
    assert {row["family"] for row in json.loads(fitting.out)["recipes"]} == {"bert"}
    roberta = write_model(tmp_path / "roberta", "camembert")
    shown = fine(qdqbench("recipes", "list", "--model", roberta))
    assert "roberta-int8-linears" in shown.out
    assert "bert-int8-linears" not in shown.out.replace("roberta-", "")
    fitting = json.loads(qdqbench("recipes", "list", "--model", roberta, "--json").out)["recipes"]
    (first,) = (row["recipe"] for row in fitting if "tensorrt" in row["start_in"])  # measured or not
    assert re.search(rf"\b{first}(\s+TensorRT)? \*", shown.out)


def test_a_family_free_name_is_resolved_by_the_model(qdqbench, sst2, tmp_path):
    data = ["--task", "sst2", "--data", sst2.data, "--out", tmp_path / "run", "--until", "baseline"]
    model = write_model(tmp_path / "model", "xlm-roberta", entries())
    done = fine(qdqbench("run", "int8-ffn", "--model", model, *data))
    assert "judged by: qdqbench report /" in " ".join(done.out.split())  # no markup around the command
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["name"] == "roberta-int8-ffn"
    lost = qdqbench("run", "int8-residual-qat", "--model", model, *data)
    assert lost.code == 1
    assert re.fullmatch(r"qdqbench: family roberta has no recipe 'int8-residual-qat'.*\n", lost.err)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("bert-") or "int8-ffn" in name])
def test_recipes_show_what_is_shipped(name, qdqbench, tmp_path):
    for options in ([], ["--resolved"]):
        done = fine(qdqbench("recipes", "show", name, *options))
        assert parse_recipe(done.out, "shown") == load_recipe(name)
    mine = tmp_path / "mine.yaml"
    mine.write_text(done.out)
    assert qdqbench("recipes", "show", mine).out == done.out
    done = fine(qdqbench("recipes", "validate", mine, name))
    assert done.out.count(": valid\n") == 2


def test_recipes_validate_names_the_nearest_key(qdqbench, tmp_path):
    (tmp_path / "good.yaml").write_text(dump_recipe(load_recipe("bert-fp16")))
    (tmp_path / "bad.yaml").write_text("version: 1\nname: x\ncalibratoin: {samples: 8}\n")
    done = ended(qdqbench("recipes", "validate", tmp_path / "good.yaml", tmp_path / "bad.yaml"), 1)
    assert re.fullmatch(r"qdqbench: .*bad\.yaml.*'calibratoin'.*'calibration'.*\n", done.err)


# check


def test_check_of_a_good_file(finished_run, qdqbench):
    graph = finished_run / "model.int8.onnx"
    for options in ([graph], [graph, "--recipe", "bert-int8-linears"], [finished_run]):
        done = fine(qdqbench("check", *options, "--json"))
        assert json.loads(done.out)["findings"] == []
    total = len([node for node in onnx.load(graph).graph.node if node.op_type in ("MatMul", "Gemm")])
    for target in (graph, finished_run):
        shown = qdqbench("check", target)
        assert shown.code == 0
        told = f"12 of 14 linears in INT8, 0 of {total - 14} products of activations"
        assert shown.out == f"{told}\nno findings\n"


def test_check_counts_what_tensorrt_refuses(tmp_path, qdqbench):
    """ONNX Runtime's formats: none of it runs, and equal findings are one."""
    path = write_dynamic(tmp_path, "dynamic.onnx")
    done = ended(qdqbench("check", path, "--json"), 2)
    counts = json.loads(done.out)["counts"]
    assert (counts["gemms"], counts["int8"], counts["refused"], counts["floating_point"]) == (7, 0, 5, 2)
    shown = qdqbench("check", path)
    assert shown.code == 2
    text = " ".join(shown.out.split())
    assert "of 7 GEMMs, 5 in INT8 that it refuses (5 MatMulInteger), 2 in floating point" in text
    assert "8 findings of 1 kind: 8 errors, 8 of them refusals" in text
    assert text.count("unsupported-op") == 1
    assert "\n2. " not in shown.out
    assert text.count(" - ") == 0
    every = " ".join(qdqbench("check", path, "--all").out.split())
    assert every.count("TensorRT does not parse ") == 1 + 8  # an example, and each place


def test_check_leaves_out_what_is_allowed(tmp_path, qdqbench):
    path = write_static(tmp_path, "static.onnx")
    counts = json.loads(qdqbench("check", path, "--json").out)["counts"]
    codes = ("quantized-layernorm", "quantized-softmax")
    allowed = [word for code in codes for word in ("--allow", code)]
    told = json.loads(qdqbench("check", path, *allowed, "--json").out)
    assert told["counts"]["findings"] == counts["findings"] - 3
    assert told["counts"]["gemms"] == counts["gemms"]
    refused(qdqbench("check", path, "--allow", "uint9"), "no finding is called uint9")


def test_check_without_a_graph(a_run, qdqbench, tmp_path):
    (a_run / "model.int8.onnx").unlink()
    refused(qdqbench("check", a_run), f"`qdqbench export {a_run}` writes it")
    (tmp_path / "not.onnx").write_text("hello")
    done = ended(qdqbench("check", tmp_path / "not.onnx"), 1)
    assert re.fullmatch(r"qdqbench: .*not\.onnx.*\n", done.err)


def test_check_against_another_recipe(finished_run, qdqbench):
    done = qdqbench("check", finished_run / "model.int8.onnx", "--recipe", "bert-int8-ffn", "--json")
    assert (done.code, done.err) == (2, "")
    nodes = " ".join(row["node"] for row in json.loads(done.out)["findings"])
    assert "layer.0/attention/self/query" in nodes
    assert "layer.1/output/dense" not in nodes


# profile


def test_profile(finished_run, qdqbench):
    timings = json.loads((finished_run / "results.json").read_text())["timings"]
    done = fine(qdqbench("timings", finished_run, "--json"))
    assert json.loads(done.out) == timings
    shown = qdqbench("timings", finished_run)
    assert shown.code == 0
    for name, row in timings.items():
        told = rf"{name}\s+{row['wall_s']:.1f}\s+{row['cpu_s']:.1f}\s+{row['peak_rss_bytes'] / 1e6:.0f}\b"
        assert re.search(told, shown.out)
    total = sum(row["wall_s"] for row in timings.values())
    assert re.search(rf"total\s+{total:.1f}\s", shown.out)


# Not a terminal: no codes, no bars, no chatter of libraries.


@pytest.mark.long
@pytest.mark.slow
def test_a_run_is_quiet_when_not_a_terminal(sst2, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'")
    done = call_apart("run", *sst2.options, "--out", tmp_path / "run", "--json")
    assert (done.code, signs_of_life(done.err)) == (0, True)
    assert json.loads(done.out) == json.loads((tmp_path / "run" / "results.json").read_text())


def test_a_closed_pipe_is_no_error(finished_run):
    """`qdqbench ... | head -1`"""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        assert call_apart("timings", finished_run, "--json", stdout=pipe).err == ""


def test_version_short_help_and_the_groups(qdqbench):
    assert re.fullmatch(r"qdqbench \d+\.\d+\.\d+\n", qdqbench("--version").out)
    assert "Usage: qdqbench run" in qdqbench("run", "-h").out
    shown = qdqbench("-h").out
    assert "--debug" in shown
    groups = re.findall(r"^╭─ ([A-Z][\w ]+?) ─+╮$", shown, re.MULTILINE)
    assert groups == ["Options", "Run", "Inspect", "Tune", "Train", "Deploy", "Maintainers"]
