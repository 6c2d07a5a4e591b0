"""The whole path, recipe to report, for every case of `tests/runs`: each is held to all that is here."""

import io
import json
import runpy
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import pytest
from sklearn.metrics import f1_score

from qdqbench.eval.runs.report.verdict import count_linears
from qdqbench.eval.runs.results import Results
from qdqbench.eval.verification.blocks import stitch
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.models.families.known import FAMILIES
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.recipe.schema import load_recipe, shipped_recipes

from ..support.pages import offline, plain
from .cases import CASES, MARKED, Case, edited
from .served import evaluated, line_of, rows_of, value_of
from .test_run import STAGES
from .tiny import EVAL_ROWS, LAYERS, TRAIN_ROWS, files_of, fine, listing, results

pytestmark = pytest.mark.slow
OF_TOKENS, OF_TEXTS = ("tokens", "qa"), ("embed", "rerank")  # these have tests of their own for answers


def test_every_recipe_of_bert_is_a_case():
    """And of other families, those without a recipe that has more in INT8."""
    tried = {each.recipe or each.name for each in CASES.values()}
    assert {name for name in shipped_recipes() if name.startswith("bert-")} <= tried
    assert {
        name.removesuffix("-int8-linears") for name in shipped_recipes() if name.endswith("-int8-linears")
    } <= {name.removesuffix("-int8-linears") for name in tried}


@dataclass
class Run:
    """A finished run and what it was asked for."""

    case: Case
    folder: Path

    @cached_property
    def found(self):
        return Results.model_validate(results(self.folder))

    @cached_property
    def session(self):
        return Session(read_config(self.folder), self.folder)

    @cached_property
    def recipe(self):
        return load_recipe(str(self.folder / "recipe.yaml"))

    @property
    def classifies(self):
        """Its answers are classes or a score of a sequence."""
        return self.case.brings not in (*OF_TOKENS, *OF_TEXTS)

    @property
    def quantized(self):
        return bool(self.case.int8[0])

    def logits(self, stage):
        """Of every split."""
        with np.load(self.folder / "logits" / f"{stage}.npz") as saved:
            return {
                name.removesuffix(".logits"): saved[name] for name in saved.files if name.endswith("logits")
            }


def every_stage_is_done(run):
    found = run.found
    measured = [
        *run.case.stages,
        *("ptq", "reconstructed")[: len(run.recipe.trainings)],
        *["engine"] * run.case.runs,
    ]
    for name, stage in found.stages.items():
        assert stage.status == ("done" if name in measured else "skipped"), name
        assert stage.status == "done" or stage.reason
    assert {*measured} <= {*found.stages}
    skipped = () if run.quantized else ("quantize", "fake_quant", "parity")
    trained = (*run.recipe.trainings, "ptq", "reconstructed")[: 2 * len(run.recipe.trainings)]
    stages = [*(name for name in STAGES if name not in skipped), *trained]
    timings = {name: row.reused for name, row in found.timings.items()}
    again = ("quantize", "ptq", "qat") if run.case.command == "qat" else ()  # it trains, then runs
    if again and run.recipe.reconstruction:
        again = ("quantize", "reconstruction", "reconstructed", "qat")
    assert timings == {name: name in again for name in stages}
    assert all(row.wall_s >= 0 and row.peak_rss_bytes > 0 for row in found.timings.values())
    assert (found.training is not None) == bool(run.recipe.qat)


def int8_is_as_expected(run):
    products, attentions, residuals = run.case.int8
    engine = run.found.engine
    backend = {"": "tensorrt_rtx", "hopper": "cuda"}.get(run.case.backend, run.case.backend)
    assert (engine.backend, engine.not_int8) == (backend, [])
    assert engine.int8_gemms == engine.expected_int8_gemms == products
    assert engine.attention_int8 == engine.expected_attention_int8 == attentions
    assert engine.int8_residuals == engine.expected_int8_residuals == residuals
    assert engine.ahead_of_time == (run.case.backend in ("", "cuda", "hopper"))
    assert (run.folder / "engine" / engine.file).stat().st_size == engine.bytes > 0


def the_graph_has_as_much(run):
    graph = onnx.load(run.folder / ("model.int8.onnx" if run.quantized else "model.fp16.onnx")).graph
    producers = {output: node for node in graph.node for output in node.output}

    def dequantized(tensor):
        node = producers.get(tensor)
        while node is not None and node.op_type in ("Cast", "Transpose"):
            node = producers.get(node.input[0])
        return node is not None and node.op_type == "DequantizeLinear"

    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert sum(all(map(dequantized, node.input[:2])) for node in products) == run.case.int8[0]


def blocks_can_be_judged(run):
    """As a GPU verifies them; those of an engine that runs here were verified."""
    if not run.quantized:
        return
    cut = stitch(read_model(run.folder / "model.int8.onnx"), run.session.plan.family)
    onnx.checker.check_model(cut.model)
    layers = run.session.fp32_model.config.num_hidden_layers
    assert len(cut.blocks) == layers + 1 + (2 if run.case.brings == "qa" else 1)
    if run.case.runs:
        assert run.found.verification.passed
        assert len(run.found.verification.blocks) == len(cut.blocks)


def parity_holds(run):
    if not run.quantized:
        assert run.found.parity is None
        return
    products, attentions, residuals = run.case.int8
    assert run.found.parity.passed
    assert run.found.parity.padded
    if not run.session.plan.family.shared_layers:
        assert len(run.found.parity.rows) == products + 2 * attentions + residuals
        assert len(run.found.quantized_layers) == products - 2 * attentions


def the_gate_is_the_exit_status(run):
    assert run.found.gate.passed == (run.case.exit == 0), run.found.gate
    assert run.found.findings == []


def calibration_is_finite(run):
    if run.quantized:
        calibrated = json.loads((run.folder / "calibration.json").read_text())
        samples = calibrated["data"]["samples"]
        assert samples == run.found.data["calibration"]["samples"]
        if run.classifies:
            assert samples == min(TRAIN_ROWS, run.recipe.calibration.samples)
        for state in calibrated["quantizers"].values():
            amax = np.array(state["amax"])
            assert np.isfinite(amax).all()
            assert (amax > 0).all()


def fp32_answers_as_transformers(run):
    """One sample at a time, without padding, by transformers' own attention."""
    if not run.classifies:
        return
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    given = run.session.config.model
    logging.disable_progress_bar()
    model = AutoModelForSequenceClassification.from_pretrained(given).eval()
    logging.enable_progress_bar()
    tokenizer, logits = AutoTokenizer.from_pretrained(given), run.logits("fp32")
    for split, (rows, _) in run.session.eval_splits.items():
        texts = zip(*(rows.dataset[column] for column in run.session.config.task.text_columns), strict=True)
        with torch.no_grad():
            made = [model(**tokenizer(*text, return_tensors="pt")).logits[0].numpy() for text in texts]
        np.testing.assert_allclose(logits[split], np.stack(made), atol=1e-4 * max(1, np.abs(made).max()))


def ranks(values):
    return np.argsort(np.argsort(values))


METRICS = {
    "accuracy": lambda logits, labels: np.mean(logits.argmax(1) == labels),
    "f1": lambda logits, labels: (
        2 * np.sum((logits.argmax(1) == 1) & (labels == 1)) / (np.sum(logits.argmax(1)) + np.sum(labels))
    ),
    "matthews": lambda logits, labels: np.corrcoef(logits.argmax(1), labels)[0, 1],  # of two classes
    "pearson": lambda logits, labels: np.corrcoef(logits[:, 0], labels)[0, 1],
    "spearman": lambda logits, labels: np.corrcoef(ranks(logits[:, 0]), ranks(labels))[0, 1],
    "f1_micro": lambda logits, labels: f1_score(labels, logits > 0, average="micro"),
    "f1_macro": lambda logits, labels: f1_score(labels, logits > 0, average="macro"),
    "exact_match": lambda logits, labels: np.mean((labels == (logits > 0)).all(axis=1)),
}


def metrics_are_those_of_the_answers(run):
    for name in run.case.stages:
        made = run.found.stages[name]
        assert {*made.stderr} <= {*made.metrics}
        if name == "onnxruntime":
            assert {*made.vs_fp32.delta_stderr} <= {*made.metrics}
            for metric, value in made.metrics.items():
                off = value - run.found.stages["fp32"].metrics[metric]
                assert made.vs_fp32.delta[metric] == pytest.approx(off)
        if not run.classifies:
            continue
        logits, splits = run.logits(name), run.session.eval_splits
        assert made.n == EVAL_ROWS
        assert sum(map(len, logits.values())) == EVAL_ROWS * len(splits)
        for metric, value in made.metrics.items():
            split = [*splits][metric.endswith("_mm")]
            labels = splits[split][1].gold
            known = METRICS[metric.removesuffix("_mm")](logits[split], labels)
            assert value == pytest.approx(known, abs=1e-3 if metric == "spearman" else 1e-5), (name, metric)


def the_engine_answers_as_onnxruntime(run):
    if run.case.runs:
        ours, theirs = run.logits("engine"), run.logits("onnxruntime")
        for name, wanted in theirs.items():
            np.testing.assert_allclose(ours[name], wanted, atol=0.1 * np.abs(wanted).max())


def files_are_listed_and_whole(run):
    sizes = {row.name: row for row in run.found.files}
    assert all((run.folder / name).stat().st_size == row.bytes for name, row in sizes.items())
    assert sizes["model.fp16.onnx"].fp32_ratio < 0.9
    assert ("model.int8.onnx" in sizes) == run.quantized
    assert not [name for name in listing(run.folder) if name.endswith(".tmp")]
    if not run.case.change and not run.case.backend and not run.case.options:
        assert run.recipe.name == (run.case.recipe or run.case.name)
        assert run.recipe == load_recipe(run.recipe.name)


def the_report_shows_the_figures(run):
    page, text = (run.folder / "report.html").read_text(), (run.folder / "report.md").read_text()
    offline(page)
    plain(text)
    shown = [run.recipe.name]
    for name in (*run.case.stages, *["engine"] * run.case.runs):
        stage = run.found.stages[name]
        shown += [
            f"{value:.4f}" for metric, value in stage.metrics.items() if metric in run.found.task["metrics"]
        ]
    done, linears = count_linears(run.found, run.found.engine)
    assert done == len(run.found.quantized_layers)
    shown += [f"{done} of {linears}"] if run.quantized else []
    for figure in shown:
        assert figure in page, figure
        assert figure in text, figure


def what_is_deployed_answers_as_the_run(run):
    """In this process; that it needs nothing else is another test's."""
    script = "openvino" if run.case.backend == "openvino" else "onnxruntime"
    stage, most = ("engine", 5e-3) if run.case.backend == script else ("onnxruntime", 2e-2)
    lines = map(line_of, rows_of(run.folder, 16))
    made = [*map(value_of, answers_here(run.folder / "deploy" / f"run_{script}.py", lines))]
    known = evaluated(run.folder, 16, stage)
    if isinstance(known, list):
        assert made == known
    else:
        np.testing.assert_allclose(made, known, atol=most)


def answers_here(script, lines):
    """As `deployed.answers` without a process."""
    before = {*sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script)])
        patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        patch.setattr(sys, "stdout", said := io.StringIO())
        patch.syspath_prepend(str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            for name in {*sys.modules} - before:
                if str(script.parent) in (getattr(sys.modules[name], "__file__", None) or ""):
                    del sys.modules[name]
    return [json.loads(line) for line in said.getvalue().splitlines()]


INVARIANTS = (
    every_stage_is_done,
    int8_is_as_expected,
    the_graph_has_as_much,
    blocks_can_be_judged,
    parity_holds,
    the_gate_is_the_exit_status,
    calibration_is_finite,
    fp32_answers_as_transformers,
    metrics_are_those_of_the_answers,
    the_engine_answers_as_onnxruntime,
    files_are_listed_and_whole,
    the_report_shows_the_figures,
    what_is_deployed_answers_as_the_run,
)


@pytest.mark.parametrize("case", MARKED)
def test_a_whole_run(case, whole_run):
    run = Run(case, whole_run(case.name))
    for holds in INVARIANTS:
        holds(run)


# one of each kind of engine, training and data; the others in the long command
AGAIN = ("cpu-openvino", "cuda", "bert-fp16", "bert-int8-linears", "trained", "own-csv", "qa", "embed")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(*case.values, id=case.id, marks=() if case.id in AGAIN else pytest.mark.long)
        for case in MARKED
    ],
)
def test_a_second_call_reuses_every_stage(case, whole_run, given, tmp_path, qdqbench):
    out = Path(shutil.copytree(whole_run(case.name), tmp_path / "run"))
    before, numbers = files_of(out), results(out)
    with pytest.MonkeyPatch.context() as patch:
        case.pretend(patch)
        fine(qdqbench(*case.words(given(case.brings), tmp_path), "--out", out))
    again = results(out)
    assert {row["reused"] for row in again["timings"].values()} == {True}
    assert files_of(out) == before
    for name in ("stages", "engine", "parity", "quantizers", "gate", "warnings", "files", "findings"):
        assert again[name] == numbers[name], name


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES[1:], ids=lambda family: family.name)
def test_the_layers_of_a_family_are_ranked(family, given, tmp_path, qdqbench):
    recipe, out = f"{family.name}-int8-linears", tmp_path / "sensitivity"
    recipe = edited(tmp_path / "short.yaml", {"calibration": {"samples": 64}}, recipe)
    options = given(family.model_types[0]).options
    fine(qdqbench("sensitivity", recipe, *options, "--samples", "16", "--out", out))
    rows = json.loads((out / "sensitivity.json").read_text())["rows"]
    linears = {name for row in rows if row["group"] == "linear" for name in row["modules"] or [row["name"]]}
    assert LAYERS * len(family.linears) <= len(linears)
    assert load_recipe(str(out / "recipe.yaml")).model.family == family.name
