"""The house keeps its shape: folders that say what they hold, one direction of imports, paths that exist."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.prose import DOCS, DOCUMENTS, ROOT

PRODUCT = ("api", "eval", "quantize", "recipes")
FOLDERS = sorted({path.parent for top in PRODUCT for path in (ROOT / top).rglob("*.py")})
MODULES = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))
# libraries that take a noticeable part of a second, or that are not there without a GPU or an extra
HEAVY = {"torch", "transformers", "modelopt", "onnx", "onnxruntime", "datasets", "huggingface_hub"}
HEAVY |= {
    "accelerate",
    "safetensors",
    "sklearn",
    "scipy",
    "pandas",
    "matplotlib",
    "optuna",
    "sqlalchemy",
    "rich",
}
HEAVY |= {"rich", "jinja2", "nncf", "psutil", "numpy", "tensorrt", "tensorrt_rtx", "pyarrow", "seqeval"}
HEAVY |= {"wandb", "mlflow", "mteb", "tqdm"}


def name_of(path):
    """A file's module, as `qdqbench.eval.runs.run`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    kept = [part for part in parts if part != "__init__"]
    return ".".join(["qdqbench", *(kept[1:] if kept[:1] == ["api"] else kept)])


FILES = {name_of(path): path for path in MODULES}


def imported(nodes):
    """Modules that statements import; `from package import module` is the module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)


@functools.cache
def loads_heavy(module):
    """Whether importing a module of ours imports a heavy library (numpy and onnx, which are quick, aside)."""
    if module not in FILES:
        return module.partition(".")[0] in HEAVY - {"numpy", "onnx"}
    statements = ast.parse(FILES[module].read_text()).body
    return any(loads_heavy(name) for name in imported([*statements]) if name != module)


def inside_functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imported([*ast.walk(node)])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_says_in_a_sentence_what_it_holds(folder):
    told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert re.fullmatch(r"[^\n]+[.)]", told), f"{folder}: {told!r}"


def test_the_index_of_documents_names_all_of_them():
    docs = ROOT / "docs"
    named = re.findall(r"\(([\w/.-]+\.md)\)", (docs / "README.md").read_text())
    assert set(named) == {str(path.relative_to(docs)) for path in DOCS} - {"README.md"}


def test_an_import_inside_a_function_is_of_something_heavy():
    """In the command line modules of ours too: help is instant."""
    light = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in MODULES
        for name in inside_functions(path)
        if not (name.partition(".")[0] in HEAVY or loads_heavy(name))
        and not (
            ("cli" in path.parts or path.name == "_options.py")
            and name.partition(".")[0] in ("qdqbench", "pydantic", *sys.stdlib_module_names)
        )
    ]
    assert not light, "\n".join(light)


def test_nothing_below_imports_the_public_names():
    public = [
        f"{path}"
        for path in MODULES
        for name in imported([*ast.walk(ast.parse(path.read_text()))])
        if name == "qdqbench"
    ]
    assert public == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_and_target_that_a_document_names_exists(document):
    text = document.read_text()
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"`make (\w+)", text)} <= {*targets}
    inline = re.findall(
        r"`((?:api|quantize|eval|recipes|tests|tools|docs)/[\w./-]*)`",
        re.sub(r"```.*?```", "", text, flags=re.S),
    )
    pictured = re.findall(r"\b((?:quantize|eval)/[a-z]+|(?:api|recipes)/)(?=[ ,:\"])", text)
    missing = [name for name in {*inline, *pictured} if not (ROOT / name).exists()]
    assert missing == []
    for module, name in re.findall(r"`(qdqbench\.[\w.]+)\.(\w+)", text):
        where = FILES.get(f"{module}.{name}") or FILES[module]
        assert re.search(rf"^(class |def |){name}\b", where.read_text(), re.MULTILINE) or where.stem == name


def test_the_picture_has_every_folder():
    picture = re.findall(r"```mermaid\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[0]
    inner = {str(folder.relative_to(ROOT)) for folder in FOLDERS if len(folder.relative_to(ROOT).parts) == 2}
    assert inner - set(re.findall(r"(?:quantize|eval|api)/[a-z]+", picture)) == set()


def test_an_import_upwards_and_a_circle_are_seen(tmp_path):
    """By import-linter in a copy with planted lines, inside a function too; `dev.py lint` checks the tree."""
    package = tmp_path / "qdqbench"
    for top in PRODUCT:
        source, target = ROOT / top, package if top == "api" else package / top
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, line in {
        "names": "def f():\n    import qdqbench.quantize.recipe.plan, qdqbench.quantize.utils.errors\n",
        "errors": "import qdqbench.quantize.utils.names\n",
    }.items():
        with (package / "quantize" / "utils" / f"{module}.py").open("a") as file:
            file.write(f"\n{line}")
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    paths = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count(" BROKEN")) == (1, 2), done.stdout[-3000:]
    assert "qdqbench.quantize.utils is not allowed to import qdqbench.quantize.recipe" in done.stdout
    assert "no circle between modules BROKEN" in done.stdout
