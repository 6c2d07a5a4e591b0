"""Reports of training: fine-tuning over seeds, and QAT in the report of a run."""

import json
import math
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from qdqbench.eval.runs.report import training
from qdqbench.eval.runs.report import verdict as wording
from qdqbench.eval.runs.results import QAT_STAGES, STAGES, Results
from qdqbench.quantize.report.document import Block, Chart, Columns, Pairs
from qdqbench.quantize.report.render import render_screen
from qdqbench.quantize.training.results import Finetuning, Spread, TrainingRun
from qdqbench.quantize.utils.trackers import LogRow

from ....support.pages import offline, plain
from ....support.runs import GARBLED, poisoned
from ....support.runs import sample as sample_run
from ....support.trainings import failed_run, finetuning, log_of, qat_run, run_of
from .test_report import terminal, written


def row_of(**values: float) -> LogRow:
    return LogRow(step=10, epoch=0.1, **values)


def hostile() -> Finetuning:
    result = finetuning([run_of(0, notes=["resumed"]), failed_run(1)])
    for run in result.runs:
        run.metrics = {GARBLED: 0.9} if run.metrics else {}
        for row in run.log:
            row.values = {GARBLED: row.score} if row.score is not None else {}
    result.spread = {GARBLED: Spread(mean=0.9, sd=None, n=1)}
    fields = poisoned(result.model_dump())
    fields["task"]["metrics"] = [GARBLED]
    return Finetuning.model_validate(fields)


CASES = {
    "five seeds": lambda: finetuning([run_of(seed) for seed in range(4)] + [failed_run(4)]),
    "one seed": lambda: finetuning([run_of(7)]),
    "all failed": lambda: finetuning([failed_run(0), failed_run(1, reason=None)]),
    "no log": lambda: finetuning([run_of(0).model_copy(update={"log": []})]),
    "twenty seeds": lambda: finetuning([run_of(seed, log=log_of(seed, 20, 1)) for seed in range(20)]),
    "nothing": lambda: finetuning([]),
    "not numbers": lambda: finetuning(
        [failed_run(0, log=[row_of(loss=math.nan), row_of(score=math.inf)]), run_of(1)]
    ),
    "hostile": hostile,
}


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Finetuning, Path]:
    folder = tmp_path_factory.mktemp("finetune")
    result = CASES[request.param]()
    training.write_finetuning(result, folder)
    return result, folder


def shown(result: Finetuning, width: int = 110) -> str:
    stream = StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    console.print(render_screen(training.finetuning_report(result)))
    return stream.getvalue()


def test_both_files_are_whole_and_run_nothing(made: tuple[Finetuning, Path]) -> None:
    _, folder = made
    assert sorted(path.name for path in folder.iterdir()) == ["finetune.html", "finetune.md"]
    offline((folder / "finetune.html").read_text(encoding="utf-8"))
    markdown = (folder / "finetune.md").read_text(encoding="utf-8")
    plain(markdown)
    tables = re.findall(r"(?m)(?:^\|.*\n)+", markdown)
    assert len(tables) >= 4
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table[:300]


def test_a_failure_is_told_once_and_other_warnings_stay() -> None:
    result = finetuning([run_of(0), failed_run(1)])
    result.warnings.append("--limit 64: a part of the train split only")
    assert training.finetuning_report(result).warnings == ["--limit 64: a part of the train split only"]
    assert "warning: --limit 64" in shown(result)


def test_the_terminal_fits_one_screen_and_reads_no_markup() -> None:
    text = shown(CASES["five seeds"]())
    assert len(text.splitlines()) <= 24
    assert "4 seeds" in text
    assert "[red]" in shown(hostile(), width=4000)


def columns_of(blocks: list[Block]) -> list[Columns]:
    return [block for block in blocks if isinstance(block, Columns)]


def charts_of(runs: list[TrainingRun]) -> list[str]:
    parts = [part for block in columns_of(training.curve_blocks(runs)) for part in block.parts]
    drawn = [each.draw() for part in parts for each in part if isinstance(each, Chart)]
    return [svg for svg in drawn if svg]


def facts_of(run: TrainingRun | None) -> dict[str, str]:
    pairs = columns_of(training.training_blocks(run))[-1].parts[0][0]
    assert isinstance(pairs, Pairs)
    return dict(pairs.rows)


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", svg)


def test_charts_show_loss_and_every_held_out_measure() -> None:
    charts = charts_of([run_of(0), run_of(1)])
    titles = [re.search(r'aria-label="([^"]+)"', chart)[1] for chart in charts]  # type: ignore[index]
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


def test_charts_show_where_a_qat_began_and_how_far_a_failed_seed_came() -> None:
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
def test_the_score_is_named_after_the_measure_that_it_is(
    values: dict[str, float], score: float, name: str
) -> None:
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
            "QAT won back 0.0147 ± 0.0042 of accuracy (against FP32: PTQ -0.0170 ± 0.0021, beyond noise, QAT "
            "-0.0023 ± 0.0021, within noise)",
        ),
        (
            qat_run(gain=-0.011, ptq=-0.001),
            "QAT made it WORSE by 0.0110 ± 0.0042 of accuracy (against FP32: PTQ -0.0010 ± 0.0021, within "
            "noise, QAT -0.0120 ± 0.0021, beyond noise)",
        ),
        (
            qat_run(gain=-0.002, within=True, ptq=-0.001),
            "QAT changed accuracy by -0.0020 ± 0.0042, within noise (against FP32: PTQ -0.0010",
        ),
        (
            qat_run(gain=0.0, within=True, training=run_of(0).model_copy(update={"best_step": 0})),
            "QAT gained nothing: the weights before training were the best on the held-out rows (against "
            "FP32: PTQ -0.0170",
        ),
        (qat_run(qat_vs_ptq=None), "QAT and PTQ were not compared with each other (against FP32: PTQ"),
        (qat_run(stages=sample_run().stages), "PTQ and QAT were not both scored"),
    ],
)
def test_the_verdict_says_what_training_won_back(results: Results, clause: str) -> None:
    said = wording.run_verdict(results)
    assert wording.qat_clause(results).startswith(clause)
    assert f"; {clause}" in said.sentence


def test_a_missing_ptq_stage_is_missed_only_with_qat(tmp_path: Path) -> None:
    without = qat_run(stages=sample_run().stages)
    assert "PTQ fake-quant was skipped: no reason was recorded." in wording.run_verdict(without).notes
    assert not any("PTQ" in line for line in wording.run_verdict(sample_run()).notes)
    assert (sample_run().expected_stages, without.expected_stages) == (STAGES, QAT_STAGES)
    for text in (*written(sample_run(), tmp_path), terminal(sample_run())):
        assert not re.search(r"PTQ|QAT fake|uantization-aware", text)


def test_hostile_strings_of_a_qat_stay_text(tmp_path: Path) -> None:
    results = qat_run()
    assert results.training is not None
    fields = results.model_dump()
    noted = {"notes": [GARBLED], "settings": {GARBLED: GARBLED}}
    fields["training"] = poisoned(fields["training"]) | noted
    for row in fields["training"]["log"]:
        row["values"] = {GARBLED: 0.5} if row["score"] is not None else {}
    markdown, html = written(Results.model_validate(fields), tmp_path)
    offline(html)
    plain(markdown)


def test_a_training_without_a_log_still_has_its_section(tmp_path: Path) -> None:
    run = run_of(0).model_copy(update={"log": [], "samples_per_s": None})
    markdown, html = written(qat_run(training=run), tmp_path)
    assert "No step was logged" in html
    assert "| held-out score | not measured |" in markdown


def test_results_with_a_training_survive_json() -> None:
    results = qat_run()
    again = Results.model_validate_json(json.dumps(results.model_dump(mode="json"), allow_nan=False))
    assert again == results
