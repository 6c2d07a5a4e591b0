"""Every command, option, recipe, link and file that the documents name is there."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qdqbench.quantize.models.families import known
from qdqbench.quantize.recipe.schema import family_free_recipes, load_recipe, parse_recipe, shipped_recipes
from qdqbench.quantize.recipe.shipped import PLACES, choose_start
from qdqbench.quantize.tasks.task import get_task

from ..support.commands import COMMANDS, find_command
from ..support.families import write_model
from ..support.prose import DOCUMENTS, NOTEBOOKS, ROOT, read_prose
from ..support.unknown import config_for
from .tiny import fine

STAGES = "embedded baseline quantize ptq reconstruction reconstructed qat fake_quant export check parity"
UNTIL = [*STAGES.split(), "onnxruntime", "build", "verify", "engine", "evaluate", "report"]
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
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
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
    path = find_command(words)
    command, words = COMMANDS[path], words[len(path) :]
    assert not hasattr(command, "commands") or not words, f"no command {' '.join([*path, words[0]])!r}"
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
    texts = {page: (ROOT / "docs" / page).read_text().partition("<!-- machines:end -->") for page in pages}
    own = {page: text[2] or text[0] for page, text in texts.items()}  # without the table of machines
    assert {page for page, text in own.items() if len(text.splitlines()) >= 45} == set()


def test_the_recipes_to_start_with_are_those_of_the_figures():
    start = choose_start()
    text = " ".join((ROOT / "README.md").read_text().split())
    assert ", ".join(f"`{name}` {PLACES[backends]}" for backends, name in start.items()) in text
    assert f"`{start['cuda']}` changes the metric on average by <!-- figures:mean-words -->" in text


def test_every_tool_of_the_table_has_a_source():
    text = (ROOT / "docs/explanation/other-tools.md").read_text()
    rows = re.findall(r"^\| \[([\w ]+)\]\((https://[^)]+)\) \|(.*)$", text, re.MULTILINE)
    assert {name for name, _, _ in rows} == {
        "ModelOpt", "Optimum", "ONNX Runtime", "NNCF", "Neural Compressor", "Polygraphy",
    }  # fmt: skip
    assert len({row.count("|") for _, _, row in rows}) == 1


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
            if path == ("recipes", "from-cache"):
                continue  # needs a cache and a graph: tests/unit/lint/test_cache_import.py
            done = fine(qdqbench(*path, *words))
            if target:
                Path(target).write_text(done.out)
            ran += 1
    assert ran


def test_every_option_in_the_text_exists():
    known = {"--debug", "--help"}
    for parameter in (each for command in COMMANDS.values() for each in command.params):
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
    assert named - known <= {"--strict", "--fake", "--clients", "--peer", "--tokens"}


def test_every_option_of_a_script_exists():
    shown = []
    for document in DOCUMENTS:
        text = document.read_text().replace("\\\n", " ")
        found = re.findall(
            r"(?:^|`)python3? (?:-m )?(tools[/.][\w/.]+|dev\.py)([^`\n]*(?:\n[^`\n]+)?`|[^`\n]*$)", text, re.M
        )
        shown += [(*each, "ommit 561fc284" in text) for each in found]
    assert len(shown) > 10
    for script, words, finished in shown:
        path = script if script.endswith(".py") else f"{script.replace('.', '/')}.py"
        if finished and not (ROOT / path).exists():
            continue  # the page says which commit has it
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
