"""The package as it is installed: its parts, its data, and a help that loads nothing heavy."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto
from onnx.helper import make_graph, make_model, make_node, make_tensor_value_info
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..support.commands import COMMANDS
from ..support.prose import ROOT

FOLDERS = ("api", "quantize", "eval", "recipes")
RECORD = Path("quantize/utils/system/commit.txt")
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "numpy", "datasets", "matplotlib", "modelopt")


def python(code, **options):
    """What a process of its own prints, which must end well."""
    given = {"capture_output": True, "text": True} | options
    done = subprocess.run([sys.executable, "-c", code], check=False, **given)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    return {pin.name: Version(str(pin.specifier).removeprefix("==")) for pin in here}


def test_pinned_versions_are_within_the_bounds(pyproject, pinned):
    project = pyproject["project"]
    texts = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    needs = {need.name: need.specifier for need in map(Requirement, texts)}
    assert [name for name in needs.keys() & pinned.keys() if pinned[name] not in needs[name]] == []
    tried = dict(re.findall(r"(\S+)==(\S+)", (ROOT / "constraints.txt").read_text().splitlines()[1]))
    for name in ("torch", "onnxruntime"):
        assert Version(tried[name]) in needs[name]
        major, minor, *_ = max(Version(tried[name]), pinned[name]).release
        assert f"{major}.{minor + 1}" not in needs[name], f"{name} has a bound that was not tested"


def test_the_changelog_dates_this_version_and_has_a_line_for_each_change(pyproject):
    text = (ROOT / "CHANGELOG.md").read_text().partition("\n## Unreleased\n")
    head, *changes = (text[2] or text[0]).partition("\n## ")[2].splitlines()
    assert re.fullmatch(rf"{re.escape(pyproject['project']['version'])} - 20\d\d-[01]\d-[0-3]\d", head)
    sections = "\n".join(changes).split("\n### ")[1:]
    assert len(sections) > 3
    for section in sections:
        assert re.fullmatch(r"\w+\n\n(- [^\n]+\.\n?)+\n?", section), section


def test_classifiers_name_the_versions_of_python_that_are_allowed(pyproject):
    project = pyproject["project"]
    opener = "Programming Language :: Python :: 3."
    named = {text.removeprefix(opener) for text in project["classifiers"] if text.startswith(opener)}
    allowed = SpecifierSet(project["requires-python"])
    assert named == {str(minor) for minor in range(40) if f"3.{minor}" in allowed}


def test_no_other_top_level_folder_holds_product_code():
    tops = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert tops == set(FOLDERS)


BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A commit, the sdist made from a checkout of it, unpacked, and the wheel made from that, installed."""
    home = tmp_path_factory.mktemp("built")
    checkout, dist, installed = home / "checkout", home / "dist", home / "site-packages"
    for folder in (*FOLDERS, "tests", "tools", "docs", ".ci", ".github"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, checkout)

    def call(folder, *command):
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        call(checkout, "git", *words)
    call(checkout, sys.executable, "-c", BUILD, "build_sdist", dist)
    (sdist,) = dist.glob("*.tar.gz")
    shutil.unpack_archive(sdist, home)
    unpacked = home / sdist.name.removesuffix(".tar.gz")
    call(unpacked, sys.executable, "-c", BUILD, "build_wheel", dist)
    (wheel,) = dist.glob("*.whl")
    shutil.unpack_archive(wheel, installed, format="zip")
    return call(checkout, "git", "rev-parse", "HEAD"), unpacked, installed


def test_a_wheel_knows_its_commit(built):
    commit, _, installed = built
    code = "from qdqbench.quantize.utils.system.environment import *; print(describe_environment()['git'])"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    assert python(code, cwd=os.sep, env=environment).strip() == commit


def test_an_sdist_has_the_repository_and_a_wheel_the_package(built):
    _, unpacked, installed = built
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a checkout: no list of files to compare with")
    names = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert {name for name in names if not (unpacked / name).is_file()} == {".gitignore"}
    product = {Path(name) for name in names if name.startswith(FOLDERS) and not name.endswith(".md")}
    expected = {path.relative_to("api") if path.parts[0] == "api" else path for path in product}
    package = installed / "qdqbench"
    found = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert {path for path in found if path.suffix != ".pyc"} == {*expected, RECORD}


def test_nothing_generic_is_importable():
    # from elsewhere than the repository, `eval` must not be a module of ours
    code = "import importlib.util, json; print(json.dumps([importlib.util.find_spec(n) is None for n in %r]))"
    assert json.loads(python(code % (FOLDERS,), cwd=os.sep)) == [True] * 4


def test_the_console_script(pyproject):
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


def test_help_imports_nothing_heavy():
    """One process for all: what a command loads, those behind it have too."""
    commands = [[*words] for words in COMMANDS]
    shown = python(HELP.format(commands=commands))
    assert shown.count("Usage: ") == len(commands) > 25
    told = [line.split()[1:] for line in shown.splitlines() if line.startswith(":: ")]
    for command, loaded in zip(commands, told, strict=True):
        assert "typer" in loaded
        assert not {*loaded} & {*HEAVY}, command


def test_help_is_quick():
    """Best of three, in processor time: 0.5 s, or on a slow machine six times an import of NumPy."""
    own, numpy = HELP.format(commands=[[]]), "import time, numpy; print(time.process_time())"
    times = {own: [], numpy: []}
    for code, taken in [*times.items()] * 3:
        taken.append(float(python(code).split()[-1]))
    assert min(times[own]) < max(0.5, 6 * min(times[numpy]))


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        (  # what every command loads first, before it reads what it was given
            "quantize.utils.errors quantize.utils.files quantize.recipe.schema quantize.recipe.plan "
            "quantize.pipeline.session quantize.pipeline.pipeline quantize.models.load cli.app "
            "cli.run cli.tune cli.serve cli.compare cli.lint cli.recipes",
            {"torch", "transformers", "datasets", "onnxruntime", "matplotlib"},
        ),
        ("quantize.lint.logs", {"qdqbench.quantize.graph.export", "qdqbench.quantize.recipe.schema"}),
    ],
)
def test_importing_a_module_imports_nothing_needlessly(imported, absent):
    code = f"import sys\nfor n in {imported.split()}: __import__('qdqbench.' + n)\nprint(*sys.modules)"
    assert absent.isdisjoint(python(code).split())


def test_a_wrong_argument_is_refused_before_pytorch_loads():
    """A second, not eight: of a name, a field, a stage, a task without its model, and a folder."""
    words = "run x,run --set x=1,run --until x,run --task x,finetune --task x,search x,auto x,bench x,serve x"
    code = (
        "import sys, qdqbench.cli.app as app\n"
        f"for words in {[each.split() for each in words.split(',')]}:\n"
        "    sys.argv = ['qdqbench', *words]\n"
        "    try: app.main()\n"
        "    except SystemExit as stop: print(stop.code, 'torch' in sys.modules)"
    )
    assert python(code).splitlines() == ["1 False"] * len(words.split(","))


def test_a_file_is_checked_and_diagnosed_without_pytorch(tmp_path):
    """Neither command needs what only training and evaluation need, nor the stages of a run."""
    shape, path = [2, 2], tmp_path / "model.onnx"
    values = [make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("a", "b", "c")]
    onnx.save(
        make_model(make_graph([make_node("MatMul", ["a", "b"], ["c"])], "g", values[:2], values[2:])), path
    )
    absent = {*HEAVY, "sklearn", "scipy", "pandas", "accelerate", "optuna", "openvino"} - {"onnx", "numpy"}
    absent.add("qdqbench.eval.runs.run")
    for command in ("check", "diagnose"):
        code = (
            f"import sys; sys.modules.update(dict.fromkeys({absent})); "
            f"sys.argv = ['qdqbench', {command!r}, {str(path)!r}, '--json']; "
            "from qdqbench.cli.app import main; main()"
        )
        assert json.loads(python(code))
