"""The newest versions are installed without pins, and the first failure is told."""

import subprocess
import sys

import pytest
from tools import newest


@pytest.mark.parametrize(("fails", "ran"), [(None, 5), ("onnxruntime", 3), ("list", 4)])
def test_commands_run_until_one_fails(monkeypatch, fails, ran):
    called = []

    def run(command, **_):
        called.append([*map(str, command)])
        return subprocess.CompletedProcess(command, 3 * (fails in command))

    monkeypatch.setattr(newest.subprocess, "run", run)
    monkeypatch.setattr(newest.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["newest.py", "torch", "onnxruntime"])
    assert newest.main() == (3 if fails else 0)
    assert len(called) == ran
    words = [word for command in called for word in command]
    assert not any("constraint" in word for word in words)
    # past its bound after the project has been installed within it
    assert words.index(f"{newest.ROOT}[dev]") < words.index("torch") < words.index("onnxruntime")
