"""What `doctor` says of made-up libraries and GPUs, and of this machine."""

import getpass
import json
import sys
from pathlib import Path

import pytest

from qdqbench.cli import lint as commands
from qdqbench.quantize.lint import doctor
from qdqbench.quantize.lint.doctor import Library, anonymous, look, probe, state_of, unmet
from qdqbench.quantize.lint.machines import find_machine
from qdqbench.quantize.lint.reports import doctor_report
from qdqbench.quantize.report.render import render_markdown
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import Gpu

from ...integration.tiny import call

L4, H100 = Gpu("NVIDIA L4", "8.9", "580.1"), Gpu("NVIDIA H100", "9.0", "580.1")
B300 = Gpu("NVIDIA B300", "10.3", "580.1")
CUDA = Library(version="2.13.0", detail="CUDA 13.0, 1 GPU", devices=1)
ABSENT = Library(version=None)
CPU_ONLY = Library(version="2.13.0+cpu", detail="CPU build")


def test_libraries_that_work_lack_break_or_crash(tmp_path, monkeypatch):
    made = {
        "works": "__version__ = '3.1-4-abc'; print('a banner')",
        "broken": "raise ImportError('libfoo.so: cannot open ' + __file__)",
        "crashes": "import os; os.abort()",
        "needs": "import nothing_such",
    }
    for name, text in made.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = probe([*made, "absent"])
    assert found["works"] == Library(version="3.1-4")
    assert "libfoo.so" in found["broken"].error
    assert str(tmp_path) not in found["broken"].error
    assert "signal 6" in found["crashes"].error
    assert "nothing_such" in found["needs"].error
    assert found["absent"] == ABSENT


def test_a_library_that_hangs_is_told(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "did not import" in probe(["hangs"], timeout_s=0.5)["hangs"].error


@pytest.mark.parametrize(
    ("name", "own", "torch", "gpu", "can"),
    [
        ("openvino", Library(version="2026.4"), CPU_ONLY, None, (True, True, None)),
        ("onnxruntime", ABSENT, CPU_ONLY, None, (False, False, "pip install onnxruntime")),
        ("tensorrt", Library(version=None, error="libX"), CUDA, L4, (False, False, "does not import (libX)")),
        ("tensorrt", Library(version="10.16.0"), CUDA, None, (False, False, "tensorrt_rtx from 1.6")),
        ("tensorrt", Library(version="10.16.0"), CUDA, L4, (True, True, None)),
        ("tensorrt", Library(version="10.16.0"), CPU_ONLY, L4, (False, True, "CUDA build of torch")),
        ("tensorrt", Library(version="10.16.0"), ABSENT, L4, (False, True, "torch does not import")),
        ("tensorrt_rtx", Library(version="1.7.1"), CPU_ONLY, None, (False, True, "ahead of time")),
        ("tensorrt_rtx", Library(version="1.4.0"), CPU_ONLY, None, (False, False, "builds no engine")),
        ("tensorrt_rtx", Library(version="1.7.1"), CUDA, H100, (False, False, "refuses")),
        ("tensorrt_rtx", Library(version="1.7.1"), CUDA, B300, (False, False, "refuses")),
        ("tensorrt_rtx", Library(version="1.6.1"), CUDA, H100, (True, True, None)),
        ("cuda", ABSENT, CUDA, H100, (False, False, install_command("hopper"))),
        ("cuda", Library(version="0.1.0"), CPU_ONLY, None, (False, True, "ahead of time")),
        ("cuda", Library(version="0.1.0"), CUDA, L4, (True, True, None)),
        ("cuda", Library(version="0.1.0"), CUDA, Gpu("B300", "10.3", None), (False, True, "few INT8 units")),
        ("cuda", ABSENT, CUDA, Gpu("B300", "10.3", None), (False, False, "few INT8 units")),
        ("cuda", Library(version="0.1.0"), CUDA, H100, (True, True, None)),
    ],
)
def test_what_a_backend_can_do(name, own, torch, gpu, can):
    state, (runs, builds, why) = state_of(name, own, torch, gpu), can
    assert (state.runs, state.builds) == (runs, builds)
    assert why is None if state.why is None else why in state.why


def test_requirements_that_do_not_hold_are_named(monkeypatch):
    kept = {name: version for name, version in doctor.installed().items() if name != "seqeval"}
    monkeypatch.setattr(doctor, "installed", lambda: kept | {"numpy": "1.0"})
    said = unmet()
    assert any("seqeval is not installed: pip install 'seqeval>=" in text for text in said)
    assert any("numpy is 1.0" in text for text in said)


def test_a_report_names_no_user_and_no_folder():
    home = Path.home()
    text = anonymous(f"{home}/x /home/ann/s /Users/bob/y C:\\Users\\eve\\z \x1b[31m {sys.prefix}/lib")
    for name in (f"{home}/", "ann", "bob", "eve", "\x1b", sys.prefix):
        assert name not in text


@pytest.fixture(scope="module")
def here():
    return look(offline=True)


def test_offline_asks_nobody(monkeypatch):
    monkeypatch.setattr(doctor, "probe", lambda names: dict.fromkeys(names, Library(version=None)))
    monkeypatch.setattr(doctor.threading, "Thread", lambda **_: pytest.fail("a thread was made"))
    assert look(offline=True).hub == "not asked"


def test_this_machine(here):
    assert here.libraries["torch"].version
    assert here.hub == "not asked"
    assert not here.unmet
    assert here.backends["onnxruntime"].runs
    assert here.auto in here.backends
    text = "\n".join(map(anonymous, render_markdown(doctor_report(here)).split("\n")))
    assert "onnxruntime" in text
    assert str(Path.cwd()) not in text
    assert getpass.getuser() == "root" or getpass.getuser() not in text


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (L4, "--backend tensorrt, once tensorrt runs (below); --backend tensorrt_rtx runs now"),
        (Gpu("Tesla V100", "7.0", None), "not known of this GPU"),
    ],
)
def test_a_gpu_without_tensorrt_is_told_what_runs_now(here, gpu, said):
    library = {"tensorrt": ABSENT, "tensorrt_rtx": Library(version="1.7.1")}
    states = {name: state_of(name, own, CUDA, gpu) for name, own in library.items()}
    cpu = find_cpu()
    update = {"gpu": gpu, "machine": find_machine(gpu, cpu), "backends": here.backends | states}
    text = render_markdown(doctor_report(here.model_copy(update=update)))
    assert said in " ".join(text.split())


def test_the_command(monkeypatch, capsys, here):
    monkeypatch.setenv("COLUMNS", "80")
    missing = here.model_copy(deep=True)
    for name in (*CPU_BACKENDS, "tensorrt"):
        missing.backends[name].runs, missing.backends[name].why = False, "it is not installed"
    unmet = missing.model_copy(update={"unmet": ["numpy is 1.0: pip install numpy"]})

    def ask(found, *arguments):
        monkeypatch.setattr(commands, "look", lambda *, offline: found)
        return call(capsys, "doctor", *arguments)

    made = ask(here)
    assert made.code == 0
    assert max(map(len, made.out.splitlines())) <= 80
    assert "doctor --report" in made.out
    made = ask(here, "--json", "--backend", "onnxruntime")
    assert made.code == 0
    assert json.loads(made.out)["backends"]["onnxruntime"] == {"runs": True, "builds": True, "why": None}
    for asked in ("tensorrt", "onnxruntime"):
        made = ask(missing, "--backend", asked)
        assert (made.code, made.err) == (3, f"qdqbench: {asked} cannot run here: it is not installed\n")
    assert ask(unmet).code == 2
    made = ask(here, "--backend", "metal")
    assert made.code == 1
    assert "is not one of" in made.err
