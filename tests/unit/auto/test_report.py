"""What a ladder says, of made-up steps; and the fields that the document lists."""

from qdqbench.eval.auto.report import write_auto
from qdqbench.eval.auto.results import Auto, Choice, Final, Lacks, Measured, Step, Wanted
from qdqbench.eval.auto.screen import auto_summary
from qdqbench.eval.search.results import Source

from ...support.pages import HOSTILE, offline, plain
from ...support.records import comparison, speedup

LATE = "it needs about 8 min"


def versus(delta, error):
    return {"validation": comparison({"matthews": delta}, error)}


def done(name, kind, delta, before=None, final=None, **lacks):
    measured = Measured(
        recipe=name,
        recipe_file=f"{name}/recipe.yaml",
        run=f"{name}/run",
        engine=f"{name}/run/engine/model.engine",
        int8_linears=36,
        int8_attention=0,
        stage="engine",
        metrics={"matthews": 0.42 + delta},
        vs_fp32=versus(delta, 0.006),
        before=before,
        vs_before=versus(0.02, 0.004) if before else {},
        latency=speedup(1.4, 1.3, 1.5, ms=1.5),
        latency_note="measured",
        lacks=Lacks(**lacks),
        final=final,
    )
    return Step(
        name=name,
        kind=kind,
        status="done",
        proposal=["percentile/99.99, smooth 0.65"],
        estimate_s=60.0,
        seconds=71.5,
        measured=measured,
    )


def sample(name="a-model", *, passed=True, mode="engine"):
    final = Final(folds=5, vs_fp32=versus(-0.004, 0.007), others=0.2, lacks=[])
    second = (
        done("methods", "methods", -0.002, "bert-int8-linears", final)
        if passed
        else done("methods", "methods", -0.02, "bert-int8-linears", accuracy=["2 points are lost"])
    )
    steps = [
        done("bert-int8-linears", "shipped", -0.029, accuracy=["2.90 points are lost"]),
        second,
        Step(
            name="islands", kind="islands", status="skipped", reason="it needs about 8 min", estimate_s=480.0
        ),
        Step(name="search", kind="search", status="failed", reason=name, estimate_s=20.0, seconds=3.0),
        Step(name="qat", kind="qat", status="skipped", reason=LATE, estimate_s=480.0),
    ]
    source = Source(
        mode=mode,
        label=f"of {name}",
        backend="openvino",
        version="1",
        batch=32,
        length=128,
        outside=["batch 32"],
    )
    return Auto(
        created="2026-01-01T00:00:00+00:00",
        command=f"qdqbench auto {name}",
        folder="runs/a",
        model={"name": name, "sha256": "0" * 64},
        task={"name": "cola", "metrics": ["matthews"]},
        data={"source": name, "evaluation": {"validation": 1043}, "proposals": 512, "limit": None},
        seed=0,
        gate=Wanted(max_drop=0.005),
        metric="matthews",
        fp32={"matthews": 0.42},
        budget_s=1800.0,
        spent_s=146.0,
        steps=steps,
        choice=Choice(
            passed=passed,
            step="methods",
            why="methods is the first of 2 that holds" if passed else "none of the 2 that were tried holds",
            lacks=[] if passed else ["2 points are lost"],
            recipe="runs/a/best.yaml",
            engine="runs/a/methods/run/engine/model.engine",
            run="runs/a/methods/run",
            command="qdqbench run runs/a/best.yaml --model a-model --task cola",
        ),
        source=source,
        warnings=[f"a warning {name}"],
        notes=[f"a note {name}"],
        environment={"git": None},
    )


def pages(folder, **how):
    write_auto(sample(**how), folder)
    return [(folder / f"auto.{kind}").read_text() for kind in ("html", "md")]


def test_the_report_tells_the_story(tmp_path):
    for text in pages(tmp_path):
        said = text.replace("\\", "")
        for each in (
            "Deploy methods: Matthews -0.20 ± 0.60 points (within noise) against FP32, 1.40x.",
            "by the choice of the others (5 folds) the ladder comes to -0.40 ± 0.70 points (within",
            "2.90 points are lost",
            "+2.00 ± 0.40",
            "60.0 s estimated, 71.5 s taken",
            "Skipped: it needs about 8 min",
            "runs/a/methods/run/engine/model.engine",
            "qdqbench run runs/a/best.yaml",
        ):
            assert each in said, each


def test_none_that_holds_is_said_with_what_the_best_lacks(tmp_path):
    for text in pages(tmp_path, passed=False):
        said = text.replace("\\", "")
        assert "No recipe holds. The best that was found is methods" in said
        assert "What it lacks: 2 points are lost" in said


def test_modelled_latencies_say_so(tmp_path, capsys):
    from rich.console import Console

    for text in pages(tmp_path, mode="model"):
        assert "1.40x modelled" in text
        assert "Outside of what the cost model was fitted to: batch 32" in text
    Console(width=80).print(auto_summary(sample(mode="model")))
    shown = capsys.readouterr().out
    assert "1.40x*" in shown
    assert "*: of a-model" in shown


def test_the_page_is_whole_and_names_of_others_are_only_text(tmp_path, capsys):
    from rich.console import Console

    page, markdown = pages(tmp_path, name=HOSTILE)
    assert offline(page).tags.count("svg") == 1
    assert plain(markdown)
    Console(width=80).print(auto_summary(sample(HOSTILE)))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]" in shown


def test_the_terminal_fits_80_columns_and_tells_a_reason_once(capsys):
    from rich.console import Console

    Console(width=80).print(auto_summary(sample()))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "islands, qat: Skipped: it needs about 8 min." in shown
    assert "…" not in shown


def test_the_file_is_read_back(tmp_path):
    (tmp_path / "auto.json").write_text(sample().model_dump_json())
    assert Auto.model_validate_json((tmp_path / "auto.json").read_text()) == sample()
    table = sample().to_frame().set_index("step")
    assert table.loc["methods", "delta"] == -0.002
    assert list(table.status) == ["done", "done", "skipped", "failed", "skipped"]
