"""The set-up commands: the lock has every pinned version with hashes, and no test fails by luck."""

import hashlib
import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[2]
DEV = runpy.run_path(str(ROOT / "dev.py"))
LOCKED = re.compile(r"^([\w.-]+==[\w.]+)[^\n]*((?:\\\n +--hash=sha256:[0-9a-f]{64} ?)+)$", re.MULTILINE)


def locked():
    """Return the hashes that each version has."""
    return {name: hashes.count("sha256:") for name, hashes in LOCKED.findall(DEV["LOCK"].read_text())}


def test_the_lock_has_every_pinned_version_with_a_hash():
    pinned = {
        line.partition(";")[0].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    assert len(pinned) > 20
    assert pinned <= {*locked()}
    assert all(locked().values())
    text = DEV["LOCK"].read_text()
    assert len(re.findall(r"(?m)^[a-z]", text)) == len(LOCKED.findall(text))


def test_the_lock_has_every_dependency_and_what_builds_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    given = [
        *project["dependencies"],
        *(each for extra in ("rtx", "openvino", "serve", "ray", "dev") for each in extras[extra]),
    ]
    wanted = {re.split(r"[\[<>=]", each)[0].lower() for each in given} | {*DEV["BUILD"]}
    assert wanted - {"qdqbench"} <= {name.partition("==")[0] for name in locked()}


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """Return the comparison with a lock of one file."""
    lock = tmp_path / "constraints.lock"
    lock.write_text(f"a==1 \\\n    --hash=sha256:{hashlib.sha256(b'good').hexdigest()}\n")
    compare = DEV["verify"]
    monkeypatch.setitem(compare.__globals__, "LOCK", lock)
    return compare


def test_a_changed_file_is_refused(tmp_path, verify):
    files = tmp_path / "files"
    files.mkdir()
    (files / "a-1-py3-none-any.whl").write_bytes(b"good")
    (files / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").write_bytes(b"of another index")
    verify(files)
    for name in (
        "a-1.1-py3-none-any.whl",
        "a-1+torch-py3-none-any.whl",
        "torch-2.13.0-cp311-cp311-linux_x86_64.whl",
    ):
        (files / name).write_bytes(b"evil")
        with pytest.raises(
            SystemExit, match=re.escape(f"{name} is not the file that constraints.lock lists")
        ):
            verify(files)
        (files / name).unlink()


@pytest.fixture
def call_main(monkeypatch):
    """Call `dev.py` with stand-ins for all that it runs; returns its status and what was called."""

    def call(*words, installs=False, tests=0, linters=0):
        called, replaced = [], DEV["main"].__globals__

        def start(command, stdout=None, **_):
            called.append([Path(part).name for part in command])
            print(command[1:], file=stdout, flush=True)
            return SimpleNamespace(wait=lambda: called.append(["waited"]) or linters)

        stand_ins = {
            "install": lambda *told: called.append(["install", *told]) or installs,
            "call": lambda *_: None,
            "run": lambda *told, **more: called.append(["run", *told, more]) or tests,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setitem(replaced, name, stand_in)
        monkeypatch.setattr(replaced["subprocess"], "Popen", start)
        monkeypatch.setattr(replaced["subprocess"], "run", lambda *_, **__: SimpleNamespace(returncode=0))
        monkeypatch.setattr(sys, "argv", ["dev.py", *words])
        with pytest.raises(SystemExit) as ended:
            DEV["main"]()
        return ended.value.code, called

    return call


@pytest.mark.parametrize("words", [[], ["--all"]])
@pytest.mark.parametrize(("tests", "linters"), [(0, 0), (1, 0), (0, 1)])
def test_only_all_tests_draw_at_random_and_linters_count(call_main, capsys, words, tests, linters):
    status, called = call_main("test", *words, tests=tests, linters=linters)
    assert bool(status) == bool(tests or linters)
    assert f"=== linters: {'FAILED' if linters else 'passed'}\n[" in capsys.readouterr().out
    ((*told, more),) = (each for each in called if each[0] == "run")
    assert ("not long" in told, "--durations=25" in told) == (not words, True)
    profile = "random" if words else "fixed"
    assert more == {"HYPOTHESIS_PROFILE": profile}
    drawn = settings.get_profile(profile)
    assert drawn.derandomize == (profile == "fixed")
    assert (drawn.database is None) == (profile == "fixed")


def test_what_was_installed_is_compiled_on_all_cores_with_our_modules(call_main):
    """Before the tests, whose processes may not write what they compile."""
    _, (_, compile_all, _, waited, run, *_) = call_main("test", installs=True)
    assert compile_all[1:3] == ["-m", "compileall"]
    assert "-j0" in compile_all
    assert compile_all[-4:] == [".venv", "api", "eval", "quantize"]
    assert (waited, run[0]) == (["waited"], "run")


def test_every_linter_runs_and_one_that_fails_is_named(monkeypatch):
    ran = []
    replaced = DEV["lint"].__globals__
    monkeypatch.setattr(replaced["os"], "nice", lambda _: None)
    monkeypatch.setitem(
        replaced, "run", lambda *told, **_: ran.append(f"{told[0]}") or told[1:2] == ("format",)
    )
    with pytest.raises(SystemExit, match=r"^failed: ruff format --check \.$"):
        DEV["lint"]()
    assert [Path(name).name for name in ran] == ["ruff", "ruff", "python", "lint-imports"]


def test_run_installs_what_a_first_run_needs(call_main):
    assert call_main("run", "int8-linears") == (0, [["install", "quantize,rtx,openvino"]])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"quantize", "rtx", "openvino"} <= {*project["optional-dependencies"]}
