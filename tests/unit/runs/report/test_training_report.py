"""Reports of training: fine-tuning over seeds, and QAT in the report of a run."""

import json
import math
import re

import pytest

from qdqbench.eval.runs.report import training
from qdqbench.eval.runs.report import verdict as wording
from qdqbench.eval.runs.results import BEFORE_TRAINING, STAGES, Results
from qdqbench.quantize.report.document import Chart, Columns, Pairs
from qdqbench.quantize.utils.trackers import LogRow

from ....support.pages import on_terminal
from ....support.runs import sample as sample_run
from ....support.runs import written
from ....support.trainings import failed_run, finetuning, log_of, qat_run, reconstruction, run_of


def test_a_failure_is_told_once_and_other_warnings_stay():
    result = finetuning([run_of(0), failed_run(1)])
    result.warnings.append("--limit 64: a part of the train split only")
    assert training.finetuning_report(result).warnings == ["--limit 64: a part of the train split only"]


def test_the_terminal_fits_one_screen():
    five = finetuning([run_of(seed) for seed in range(4)] + [failed_run(4)])
    text = on_terminal(training.finetuning_report(five), 110)
    assert len(text.splitlines()) <= 24
    assert "4 seeds" in text


def columns_of(blocks):
    return [block for block in blocks if isinstance(block, Columns)]


def charts_of(runs):
    parts = [part for block in columns_of(training.curve_blocks(runs)) for part in block.parts]
    drawn = [each.draw() for part in parts for each in part if isinstance(each, Chart)]
    return [svg for svg in drawn if svg]


def facts_of(run):
    pairs = columns_of(training.training_blocks(run))[-1].parts[0][0]
    assert isinstance(pairs, Pairs)
    return dict(pairs.rows)


def texts(svg):
    return re.findall(r">([^<>\n]+)</text>", svg)


def test_charts_show_loss_and_every_held_out_measure():
    charts = charts_of([run_of(0), run_of(1)])
    titles = [re.search(r'aria-label="([^"]+)"', chart)[1] for chart in charts]
    assert titles == [
        "training loss by step",
        "held-out F1 (chooses the weights) by step",
        "held-out loss by step",
        "held-out accuracy by step",
    ]
    for chart in charts:
        assert {"seed 0", "seed 1", "weights kept"} <= set(texts(chart))
    ids = re.findall(r'id="([^"]+)"', "".join(charts))
    assert len(ids) == len(set(ids))
    assert charts == charts_of([run_of(0), run_of(1)])


def test_charts_show_where_a_qat_began_and_how_far_a_failed_seed_came():
    charts = charts_of([run_of(0, log=log_of(0, first=True))])
    assert "before training (PTQ)" not in texts(charts[0])
    assert "before training (PTQ)" in texts(charts[1])
    assert "seed 0" not in texts(charts[1])
    charts = charts_of([run_of(0), failed_run(1, log=log_of(1))])
    assert "seed 1, failed" in texts(charts[0])
    assert "weights kept" not in texts(charts_of([failed_run(1, log=log_of(1))])[0])
    assert charts_of([]) == []
    row = LogRow(step=1, epoch=1, loss=math.nan, score=None)
    assert charts_of([run_of(0, log=[row])]) == []


@pytest.mark.parametrize(
    ("values", "score", "name"),
    [
        ({"loss": 0.4, "f1": 0.9}, 0.9, "f1"),
        ({"divergence": 0.25, "f1": 0.9}, -0.25, "divergence"),
        ({"loss": 0.4}, 0.7, "score"),
        ({}, 0.7, "score"),
    ],
)
def test_the_score_is_named_after_the_measure_that_it_is(values, score, name):
    row = LogRow(step=5, epoch=1, score=score, values=values)
    run = run_of(0, log=[row])
    assert training.score_name([run]) == name
    assert training.points_of(run, name) == [(5, values.get(name, score))]
    assert facts_of(run)[f"held-out {training.labelled_measure(name)}"] == f"{values.get(name, score):.4f}"


@pytest.mark.parametrize(
    ("results", "clause"),
    [
        (
            qat_run(),
            "QAT won back 0.0147 ± 0.0042 of accuracy (against FP32: PTQ -0.0170 ± 0.0021, beyond noise, "
            "SQNR 21.4 ± 0.6 dB; QAT -0.0023 ± 0.0021, within noise, SQNR 21.4 ± 0.6 dB)",
        ),
        (
            qat_run(gain=-0.011, ptq=-0.001),
            "QAT made it WORSE by 0.0110 ± 0.0042 of accuracy (against FP32: PTQ -0.0010 ± 0.0021, within "
            "noise, SQNR 21.4 ± 0.6 dB; QAT -0.0120 ± 0.0021, beyond noise, SQNR 21.4 ± 0.6 dB)",
        ),
        (
            qat_run(gain=-0.002, within=True, ptq=-0.001),
            "QAT changed accuracy by -0.0020 ± 0.0042, within noise (against FP32: PTQ -0.0010",
        ),
        (
            qat_run(gain=0.0, within=True, training=run_of(0).model_copy(update={"best_step": 0})),
            "QAT gained nothing: the weights before were the best on the held-out rows (against "
            "FP32: PTQ -0.0170",
        ),
        (qat_run(qat_vs_ptq=None), "QAT and PTQ were not compared with each other (against FP32: PTQ"),
        (qat_run(stages=sample_run().stages), "PTQ and QAT were not both scored"),
    ],
)
def test_the_verdict_says_what_training_won_back(results, clause):
    said = wording.run_verdict(results)
    assert wording.training_clause(results).startswith(clause)
    assert any(name == "Training" and text.startswith(clause) for name, text, _ in said.lines)


def test_a_missing_ptq_stage_is_missed_only_with_qat(tmp_path):
    without = qat_run(stages=sample_run().stages)
    assert "PTQ fake-quant was skipped: no reason was recorded." in wording.run_verdict(without).notes
    assert not any("PTQ" in line for line in wording.run_verdict(sample_run()).notes)
    assert sample_run().expected_stages == STAGES
    assert without.expected_stages == ("fp32", "ptq", *STAGES[1:])
    both = without.model_copy(update={"reconstruction": reconstruction()})
    assert both.expected_stages == ("fp32", *BEFORE_TRAINING, *STAGES[1:])
    for text in written(sample_run(), tmp_path):
        assert not re.search(r"PTQ|QAT fake|uantization-aware", text)


def test_one_line_has_ptq_reconstruction_and_qat(tmp_path):
    run = qat_run(reconstruction=reconstruction())
    stages = {name: run.stages[name] for name in ("fp32", "ptq")}
    stages["reconstructed"] = run.stages["fake_quant"]
    both = run.model_copy(update={"stages": stages | run.stages})
    line = next(text for name, text, _ in wording.run_verdict(both).lines if name == "Training")
    assert re.search(r"PTQ .+SQNR .+; reconstruction .+SQNR .+; QAT .+SQNR", line)
    markdown, html = written(both, tmp_path)
    assert "| bert.encoder.layer.5 | 22.0 | 23.5 | yes |" in markdown
    assert "reconstructed fake-quant" in html
    alone = both.model_copy(update={"training": None})
    assert wording.training_clause(alone).startswith("Reconstruction won back 0.0147")
    assert wording.stage_name(alone, "fake_quant") == "reconstructed fake-quant"
    nothing = reconstruction(after_db=21.0)
    assert wording.training_clause(alone.model_copy(update={"reconstruction": nothing})).startswith(
        "Reconstruction gained nothing"
    )


def test_a_training_without_a_log_still_has_its_section(tmp_path):
    run = run_of(0).model_copy(update={"log": [], "samples_per_s": None})
    markdown, html = written(qat_run(training=run), tmp_path)
    assert "No step was logged" in html
    assert "| held-out score | not measured |" in markdown


def test_results_with_a_training_survive_json():
    results = qat_run()
    again = Results.model_validate_json(json.dumps(results.model_dump(mode="json"), allow_nan=False))
    assert again == results
