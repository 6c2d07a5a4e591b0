"""Every command, option, recipe, link and file that the documents name is there."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from qdqbench.cli.app import app
from qdqbench.eval.bench.results import read_bench
from qdqbench.quantize.models.families import known
from qdqbench.quantize.recipe.schema import family_free_recipes, load_recipe, parse_recipe, shipped_recipes
from qdqbench.quantize.recipe.shipped import choose_start as start_by_device
from qdqbench.quantize.recipe.shipped import find_fastest, read_figures
from qdqbench.quantize.report.formats import in_points, label
from qdqbench.quantize.tasks.task import get_task

from ..support.families import write_model
from ..support.prose import read_prose
from ..support.unknown import config_for
from .tiny import fine

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
STAGES = "embedded baseline quantize ptq qat fake_quant export check parity onnxruntime build verify engine"
UNTIL = [*STAGES.split(), "evaluate", "report"]
RECIPES = {*shipped_recipes(), *family_free_recipes()}
NO_MODEL = ("recipes",)  # commands that need no weights, no file and no run directory


def blocks(document, *languages):
    """Contents of the fenced code blocks of these languages."""
    found = re.findall(r"^```(\S*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def lines(text):
    """Command lines of a block; a backslash joins two."""
    joined = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in joined if line.strip() and not line.strip().startswith("#")]


def spans(document):
    """Inline code."""
    written = re.sub(r"<!-- tables:begin -->.*<!-- tables:end -->", "", document.read_text(), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", written, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def shown_commands():
    """Every `qdqbench ...` line of the documents."""
    for document in DOCUMENTS:
        in_blocks = [line for text in blocks(document, "sh", "bash", "console") for line in lines(text)]
        for line in [*in_blocks, *spans(document)]:
            if line.startswith("qdqbench ") or " -m qdqbench" in line:
                yield pytest.param(line, id=f"{document.relative_to(ROOT)}: {line[:60]}")


def parsed(line):
    """The command's path, the values of its options, and the file that its output goes to."""
    words = shlex.split(line, comments=True)[1:]
    target = words[words.index(">") + 1] if ">" in words else None
    words = words[: next((i for i, word in enumerate(words) if word in (">", "|", "&&")), len(words))]
    if "-m" in words:  # a launcher of `-m qdqbench COMMAND`
        launched, *words = words[words.index("-m") + 1 :]
        assert launched == "qdqbench"
    command, path = typer.main.get_command(app), []
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"no command {' '.join([*path, words[0]])!r}"
        command = command.commands[words[0]]
        path.append(words.pop(0))
    words = [word for word in words if word != "--debug"]
    return path, command, words, target


def test_first_block_is_two_commands():
    first = re.search(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert first[1] == "sh"
    commands = first[2].splitlines()
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "python3"
        assert (ROOT / words[1]).is_file()
        # what the script says of itself
        usage = re.search(r'"""(.*?)"""', (ROOT / words[1]).read_text(), re.DOTALL)[1]
        assert command in usage
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_readme_is_one_short_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 128
    first_heading = text.index("\n## ")
    assert text.index("<picture>") < first_heading


def test_what_users_look_up_fits_one_screen():
    table = (ROOT / "docs/README.md").read_text().partition("## Look it up")[2].partition("\n## ")[0]
    pages = re.findall(r"\((how-to/[\w-]+\.md)\)", table)
    assert len(pages) == 8
    assert {page for page in pages if len((ROOT / "docs" / page).read_text().splitlines()) >= 45} == set()


def figures_between(name):
    """The text of the README between two markers, so that its words can change freely."""
    text = " ".join((ROOT / "README.md").read_text().split())
    return re.search(rf"<!-- figures:{name} -->(.*?)<!-- figures:end -->", text).group(1)


def speed_up_of(system, config):
    """Its least speed-up over a system without INT8."""
    fp16 = [each for each in config.speedups if each.system == system and "16" in each.baseline]
    return min(fp16, key=lambda each: each.value)


def configs_of(folder):
    return read_bench(ROOT / "docs" / folder / "bench.json").configs


def ratios(backend, folder, **asked):
    """Speed-ups of a backend's INT8 over the fastest FP16, of the configs that are asked for."""
    bench = read_bench(ROOT / "docs" / folder / "bench.json")
    ours = [
        each.name for each in bench.systems if (each.precision, each.backend.split()[0]) == ("int8", backend)
    ]
    configs = [each for each in bench.configs if asked.items() <= dict(each).items()]
    return [speed_up_of(system, each) for system in ours for each in configs]


def test_the_speed_ups_of_the_readme_are_measured_against_the_unpadded_encoder():
    fixed = ["measured/base-unpadded", "measured/base-384-unpadded"]
    tasks = "sst2", "mrpc", "stsb"
    real = [f"measured-real/bert-base-second-{task}-int8-residual-fused-cuda-bench" for task in tasks]
    real += [f"measured-lengths/{task}-bench" for task in tasks]
    assert not any(read_bench(ROOT / "docs" / name / "bench.json").target.random_weights for name in real)
    tables = ("speed", fixed, {"kind": "fixed"}), ("lengths", real, {"kind": "dataset", "batch": 256})
    for table, folders, asked in tables:
        for config in itertools.chain.from_iterable(map(configs_of, folders)):
            assert "unpadded-fp16" in {row.system for row in config.rows if row.status == "done"}
        backends = ("cuda", "tensorrt_rtx")
        found = [each for own in backends for folder in folders for each in ratios(own, folder, **asked)]
        assert len(found) == {"speed": 10, "lengths": 12}[table]
        assert re.findall(r"\d\.\d\dx", figures_between(table)) == [f"{each.value:.2f}x" for each in found]
        assert figures_between(table).count("slower") == sum(each.verdict == "slower" for each in found)


def test_the_speed_up_of_the_readme_on_a_cpu_is_measured():
    bench = read_bench(ROOT / "docs/measured-real/mpnet-embed-bench-openvino/bench.json")
    (config,) = (each for each in bench.configs if (each.batch, each.length) == (8, 128))
    without_int8 = ("fp32-", "bf16-", "torch-", "compile-")
    rows = [each for each in config.speedups if each.baseline.startswith(without_int8)]
    best = min(rows, key=lambda each: each.value)
    assert (len(rows), best.baseline) == (7, "bf16-openvino")
    interval = f"[{best.ci95_low:.2f}, {best.ci95_high:.2f}]"
    assert figures_between("cpu") == f"{best.value:.2f}x {interval} over OpenVINO in BF16"


def test_the_real_model_of_the_readme_is_measured():
    folder = ROOT / "docs/measured-real/bert-base-second-sst2-int8-residual-fused-cuda"
    run = json.loads((folder / "summary.json").read_text())
    scores = {stage: run["stages"][stage]["metrics"]["accuracy"] for stage in ("fp32", "engine")}
    versus, engine = run["stages"]["engine"]["vs_fp32"], run["engine"]
    assert figures_between("real") == (
        f"{scores['engine']:.4f} against {scores['fp32']:.4f} in FP32 "
        f"({versus['delta']['accuracy']:+.4f} ± {versus['delta_stderr']['accuracy']:.4f}, n = "
        f"{run['stages']['engine']['n']}), INT8 in {engine['int8_gemms']} of {engine['expected_int8_gemms']} "
        "GEMMs"
    )


def test_the_published_model_of_the_readme_is_measured():
    folder = ROOT / "docs/measured-real/mpnet-embed-int8-linears-openvino"
    run = json.loads((folder / "summary.json").read_text())
    engine, fp32 = (run["stages"][stage] for stage in ("engine", "fp32"))
    gemms = f"{run['engine']['int8_gemms']} of {run['engine']['expected_int8_gemms']}"
    assert figures_between("published") == (
        f"Spearman {engine['metrics']['spearman']:.4f} on STS-B against {fp32['metrics']['spearman']:.4f} in "
        f"FP32 (n = {engine['n']}), INT8 in {gemms} GEMMs"
    )


def test_the_rows_of_bert_base_are_measured():
    page = (ROOT / "docs/results/real-size.md").read_text()
    rows = re.findall(r"^\| (SST-2|MRPC|STS-B|RTE|MNLI|QQP)([^|]*), n = \d+ \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 7
    for task, what, told in rows:
        run = f"{task.lower().replace('-', '')}-int8-residual-fused-cuda"
        second, first = (
            ROOT / f"docs/measured-real/{model}-{run}" for model in ("bert-base-second", "bert-base")
        )
        stages, others = (
            json.loads((each / "summary.json").read_text())["stages"] for each in (second, first)
        )
        metric = "f1" if "F1" in what else "pearson" if "Pearson" in what else "accuracy"
        metric += "_mm" * ("mismatched" in what)
        known = ("fp32", "fake_quant", "onnxruntime", "engine")
        expected = [f"{stages[each]['metrics'][metric]:.4f}" if each in stages else "" for each in known]
        losses = [
            in_points(versus["delta"][metric], versus["delta_stderr"][metric], "+")
            for versus in (stages["engine"]["vs_fp32"], others["engine"]["vs_fp32"])
        ]
        speeds = ["", ""]
        if (path := second.with_name(f"{second.name}-bench") / "bench.json").is_file():
            best = [speed_up_of("int8", config) for config in read_bench(path).configs[::-1]]
            speeds = [f"**{each.value:.2f}x** [{each.ci95_low:.2f}, {each.ci95_high:.2f}]" for each in best]
        assert [cell.strip() for cell in told.split("|")] == [*expected, losses[0], *speeds, losses[1]]


def test_the_losses_of_the_readme_are_those_of_the_recipe_to_start_with():
    text = " ".join((ROOT / "README.md").read_text().split())
    chosen = find_fastest("gpu", read_figures())
    (figure,) = (each for each in read_figures() if (each.recipe, each.device) == (chosen, "gpu"))
    loss = f"{-figure.worst.points:.2f} ± {figure.worst.stderr:.2f} points"
    assert figures_between("loss").startswith(loss)
    assert f"n = {figure.worst.n}" in figures_between("loss")
    sure = [each for each in figure.accuracy if each.stderr and each.points < -2 * each.stderr]
    losses = [f"{-each.points:.2f} ± {each.stderr:.2f} {label(each.task)}" for each in sure]
    assert re.findall(r"(\d\.\d\d ± \d\.\d\d)(?: points)? \(([^)]+)\)", figures_between("beyond")) == [
        tuple(loss.rsplit(" ", 1)) for loss in losses
    ]
    assert ["TensorRT-RTX" in each.where for each in sure] == [False, True, True]
    assert f"Of {figure.mean.measurements} measurements" in text
    assert (figure.mean.tasks, figure.worst.task) == (7, "rte")
    assert "Over seven tasks" in text
    assert figures_between("mean") == f"{-figure.mean.points:.2f} ± {figure.mean.stderr:.2f} points"
    free = start_by_device()
    assert f"On a GPU start with `{free['gpu']}`, on a CPU with `{free['cpu']}`" in text


def test_every_tool_of_the_table_has_a_source():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| \[([\w ]+)\]\((https://[^)]+)\) \|(.*)$", text, re.MULTILINE)
    assert {name for name, _, _ in rows} == {
        "ModelOpt", "Optimum", "ONNX Runtime", "NNCF", "Neural Compressor", "Polygraphy",
    }  # fmt: skip
    assert len({row.count("|") for _, _, row in rows}) == 1


def test_what_the_readme_says_of_other_tools_was_measured():
    rows = json.loads((ROOT / "docs/measured-foreign/sst2.json").read_text())["rows"]
    said = figures_between("tools")
    made = {
        "modelopt": "ModelOpt ONNX",
        "nncf": "NNCF",
        "ort-qdq": "ONNX Runtime, static",
        "ort-dynamic": "ONNX Runtime, dynamic",
    }
    assert f"| FP32 | | {rows['fp32']['accuracy']:.4f} |" in said
    assert said.count("0.") == 1 + 2 * len(made)
    for name, title in made.items():
        row, engine = rows[name], rows[name]["report"]["engine_before"]
        built = f"{engine['int8_gemms']} of {engine['gemms']} " if not engine["refused"] else "refused: "
        figures = f"| {row['accuracy_before']:.4f} | {row['accuracy_after']:.4f} |"
        assert re.search(rf"\| {title}[^|]*\| {re.escape(built)}[^|]*{re.escape(figures)}", said), title
    engines = {rows[name]["report"]["engine_after"]["engine"] for name in made}
    assert engines == {
        f"{figures_between('built').replace('TensorRT-RTX', 'tensorrt_rtx')}, built ahead of time"
    }
    assert {rows[name]["report"]["engine_after"]["gemms"] for name in made} == {38}


def test_what_the_readme_says_of_its_own_run_was_measured():
    ours = json.loads((ROOT / "docs/measured-lengths/sst2-int8-linears/summary.json").read_text())
    stages, engine = ours["stages"], ours["engine"]
    assert figures_between("ours") == (
        f"{stages['onnxruntime']['metrics']['accuracy']:.4f} in ONNX Runtime, {engine['int8_gemms']} of "
        f"{engine['expected_int8_gemms']} linear layers of the encoder in INT8, and "
        f"{stages['engine']['metrics']['accuracy']:.4f} in the TensorRT-RTX {engine['version']} engine, run "
        f"on one {ours['environment']['gpu'].removeprefix('NVIDIA ')}"
    )
    assert ours["recipe"]["calibration"]["samples"] == 512


def test_documents_show_commands():
    assert len([*shown_commands()]) > 5


@pytest.mark.parametrize("line", [*shown_commands()])
def test_every_command_parses(line):
    path, command, words, _ = parsed(line)
    assert path, line
    if not words and not hasattr(command, "commands"):
        return  # only named; that it exists was asked above
    context = command.make_context(" ".join(path), [*words])
    given = context.params
    if (
        (recipe := given.get("recipe"))
        and isinstance(recipe, str)
        and not recipe.endswith((".yaml", "RECIPE"))
    ):
        assert recipe in RECIPES
    if isinstance(recipe, list):
        assert {name for name in recipe if not name.endswith(".yaml")} <= RECIPES
    if until := given.get("until"):
        assert until in UNTIL
    if task := given.get("task"):
        get_task(
            task,
            text_columns=given["text_column"] or (),
            label_column=given["label_column"],
            num_labels=given["num_labels"],
            metrics=given["metric"] or (),
        )


def test_commands_without_a_model_run(tmp_path, qdqbench, monkeypatch):
    """In the order in which a reader would type them: one writes the file that the next one reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(known, "_DESCRIBED", {})
    config_for("ernie").save_pretrained("my-ernie")  # of a type that has no recipes here
    write_model(tmp_path / "my-model", "camembert")
    ran = 0
    for document in DOCUMENTS:
        for line in (line for text in blocks(document, "sh", "bash", "console") for line in lines(text)):
            if not line.startswith("qdqbench ") or line.split()[1] not in NO_MODEL:
                continue
            path, _, words, target = parsed(line)
            if path == ["recipes", "from-cache"]:
                continue  # needs a cache and a graph: tests/unit/lint/test_cache_import.py
            done = fine(qdqbench(*path, *words))
            if target:
                Path(target).write_text(done.out)
            ran += 1
    assert ran


def test_every_option_in_the_text_exists():
    known = {"--debug", "--help"}
    groups = [typer.main.get_command(app)]
    while groups:
        command = groups.pop()
        groups += getattr(command, "commands", {}).values()
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
    tools = ("pip ", "python", "make ", "mypy ", "pytest ", "ruff ", "trtexec ", "polygraphy ")
    named = {
        option
        for document in DOCUMENTS
        for span in spans(document)
        if not span.startswith(tools)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span)
    }
    assert "--debug" in named
    # of zensical and of tools/load_serve.py
    assert named - known <= {"--strict", "--fake"}


def test_every_option_of_a_script_exists():
    shown = []
    for document in DOCUMENTS:
        text = document.read_text().replace("\\\n", " ")
        shown += re.findall(
            r"(?:^|`)python3? (?:-m )?(tools[/.][\w/.]+|dev\.py)([^`\n]*(?:\n[^`\n]+)?`|[^`\n]*$)", text, re.M
        )
    assert len(shown) > 10
    for script, words in shown:
        path = script if script.endswith(".py") else f"{script.replace('.', '/')}.py"
        source = (ROOT / path).read_text()
        for option in re.findall(
            r"(?<![\w-])--([a-z][a-z0-9-]*)", re.sub("'.*?'", "", words)
        ):  # without those of another program
            assert f'"--{option}"' in source or f'"{option}"' in source, f"{script} {words}"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=f"{document.relative_to(ROOT)}-{number}")
        for document in DOCUMENTS
        for number, text in enumerate(blocks(document, "yaml"))
    ],
)
def test_every_yaml_is_a_recipe(text):
    """Parts of a recipe too, completed with what every recipe has."""
    known = yaml.safe_load(text)
    head = "".join(f"{k}: {v}\n" for k, v in {"version": 1, "name": "x"}.items() if k not in known)
    parse_recipe(head + text, "the document")


def test_every_shipped_recipe_is_described():
    text = (ROOT / "recipes" / "README.md").read_text().partition("## Measured")[0]
    table = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert sorted(table) == sorted(family_free_recipes())
    for name in shipped_recipes():
        assert load_recipe(name).description


def anchors(document):
    """Those of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", read_prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def dead_links(document):
    """Links of a page to files and headings that are not there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", read_prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield target


def test_a_planted_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n[a](page.md#title) [b](page.md#other) [c](none.md) [d](https://example.com)\n"
    )
    assert [*dead_links(page)] == ["page.md#other", "none.md"]
    notebook = tmp_path / "page.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["# Own\n", "[a](page.md#title) [b](page.md#other) [c](#own)\n"]},
        {"cell_type": "code", "source": ["x = [d](none.md)"]},
        {"cell_type": "markdown", "source": ["[e](none.ipynb)"]},
    ]
    notebook.write_text(json.dumps({"cells": cells}))
    assert [*dead_links(notebook)] == ["page.md#other", "none.ipynb"]


def test_links_of_the_notebook_are_tested():
    assert ROOT / "docs/tutorials/quickstart.ipynb" in NOTEBOOKS


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTEBOOKS], ids=lambda path: str(path.relative_to(ROOT)))
def test_local_links_lead_somewhere(document):
    assert [*dead_links(document)] == []


@pytest.mark.parametrize("planted", ["", "[a page](nowhere.md)"])
def test_the_site_builds_without_a_warning(tmp_path, planted):
    pytest.importorskip("zensical", reason="needs zensical: pip install 'qdqbench[docs]'")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    index = tmp_path / "docs" / "README.md"
    index.write_text(f"{index.read_text()}\n{planted}\n")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not planted), done.stdout + done.stderr
    if not planted:
        searched = (tmp_path / "build" / "docs" / "search.json").read_text()
        pages = {
            path.relative_to(tmp_path / "docs").with_suffix(".html")
            for path in (tmp_path / "docs").rglob("*.md")
        }
        assert {str(page) for page in pages if page.stem != "README" and str(page) not in searched} == set()


@pytest.mark.slow
def test_every_file_of_the_stage_table_is_written(finished_run):
    page = (ROOT / "docs" / "reference" / "run-directory.md").read_text()
    table = re.findall(r"^\| (`?\w+`?) \|[^|]*\|([^|]*)\|$", page, re.MULTILINE)
    named = {stage.strip("`"): re.findall(r"`([^`]+)`", written) for stage, written in table}
    named = {stage: written for stage, written in named.items() if stage in UNTIL}
    manifest = json.loads((finished_run / "stages.json").read_text())["stages"]
    assert {*named} == {*manifest, "report"}
    for stage, written in named.items():
        assert written
        if stage == "engine" and [*manifest[stage]["outputs"]] == ["engine.json"]:
            continue  # no GPU here: the stage recorded why it was skipped
        for pattern in written:
            assert [*finished_run.glob(pattern.rstrip("/"))], pattern
