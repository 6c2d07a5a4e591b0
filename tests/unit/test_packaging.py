"""The package as it is installed: its parts, its data, and a help that loads nothing heavy."""

import fnmatch
import json
import os
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("api", "quantize", "eval", "recipes")
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "numpy", "datasets", "matplotlib", "modelopt")
COMMANDS = [
    [],
    ["run"],
    ["recipes"],
    ["recipes", "list"],
    ["check"],
    ["timings"],
    ["inspect"],
    ["bench"],
    ["quantize"],
    ["export"],
    ["build"],
    ["evaluate"],
    ["report"],
]


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found


def modules() -> list[Path]:
    return [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def package_of(folder: Path) -> str:
    """The package that a folder is: `api` is `qdqbench` itself."""
    return ".".join(["qdqbench", *(folder.parts if folder.parts[0] != "api" else folder.parts[1:])])


def test_every_folder_with_modules_is_a_package(pyproject: dict[str, Any]) -> None:
    folders = {path.parent for path in modules()}
    tools = pyproject["tool"]["setuptools"]
    assert set(tools["packages"]) == {package_of(folder) for folder in folders}
    assert tools["package-dir"] == {package_of(Path(top)): top for top in FOLDERS}  # setuptools adds the rest
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


def test_no_other_top_level_folder_holds_product_code() -> None:
    tops = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert tops == set(FOLDERS)


def test_every_data_file_is_package_data(pyproject: dict[str, Any]) -> None:
    patterns = pyproject["tool"]["setuptools"]["package-data"]
    found = [
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".md")
    ]
    assert [str(path) for path in found if not packaged(path, patterns)] == []
    assert {path.suffix for path in found} >= {".yaml", ".j2", ".json", ".typed"}


def packaged(path: Path, patterns: dict[str, list[str]]) -> bool:
    """Whether the nearest package above a file names it; `*` of setuptools does not cross folders."""
    package = next(folder for folder in path.parents if (ROOT / folder / "__init__.py").is_file())
    inner = path.relative_to(package).as_posix()
    return any(
        fnmatch.fnmatchcase(inner, pattern) and pattern.count("/") == inner.count("/")
        for pattern in patterns.get(package_of(package), ())
    )


def test_data_files_are_readable_as_resources() -> None:
    assert (resources.files("qdqbench.eval.reporting") / "templates" / "page.html.j2").is_file()
    assert (resources.files("qdqbench.quantize.utils") / "look.css").is_file()
    assert (resources.files("qdqbench.recipes") / "bert" / "bert-int8-linears.yaml").is_file()


def test_nothing_generic_is_importable() -> None:
    # from elsewhere than the repository, `eval` must not be a module of ours
    code = "import importlib.util, json; print(json.dumps([importlib.util.find_spec(n) is None for n in %r]))"
    done = subprocess.run(
        [sys.executable, "-c", code % (FOLDERS,)], capture_output=True, text=True, check=True, cwd=os.sep
    )
    assert json.loads(done.stdout) == [True] * 4


def test_the_console_script(pyproject: dict[str, Any]) -> None:
    value = pyproject["project"]["scripts"]["qdqbench"]
    assert value == "qdqbench.__main__:start"
    assert callable(metadata.EntryPoint("qdqbench", value, "console_scripts").load())


HELP = """
import sys, time
from qdqbench.cli.app import main
for words in {commands}:
    sys.argv = ["qdqbench", *words, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    print()
    print("::", *sorted({{name.partition(".")[0] for name in sys.modules}}))
print(time.process_time())
"""


def test_help_imports_nothing_heavy() -> None:
    """One process for all: what a command loads, those behind it have too."""
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(commands=COMMANDS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(COMMANDS)
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith(":: ")]
    for command, loaded in zip(COMMANDS, told, strict=True):
        assert "typer" in loaded
        assert not {*loaded} & {*HEAVY}, command


def test_help_is_quick() -> None:
    """Best of three, in processor time, which a busy machine does not lengthen: the wall limit is 0.5 s."""
    code = HELP.format(commands=[[]])
    times = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(float(done.stdout.split()[-1]))
    assert min(times) < 0.5


def test_importing_a_module_imports_no_heavy_library_needlessly() -> None:
    """What every command loads first stays light: the recipe, the errors, the files, the plan."""
    names = (
        "utils.errors",
        "utils.files",
        "recipe.schema",
        "recipe.plan",
        "pipeline.session",
        "pipeline.pipeline",
    )
    names += ("models.load",)
    code = (
        f"import sys\nfor n in {names!r}: __import__('qdqbench.quantize.' + n)\n"
        "import qdqbench.cli.run\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()).isdisjoint(
        {"torch", "transformers", "datasets", "onnxruntime", "matplotlib"}
    )
