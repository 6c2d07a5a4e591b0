"""The commit of a result is that of this code, or none."""

import subprocess

import pytest

from qdqbench.quantize.utils.system.commit import find_commit

PROJECT = '[project]\nname = "qdqbench"\n'


def checkout(folder, project):
    """A repository of one commit; returns it."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(project)

    def git(*arguments):
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(folder), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    git("tag", "v1")
    return git("rev-parse", "HEAD")


def test_the_commit_of_its_own_checkout_marked_when_dirty(tmp_path):
    commit = checkout(tmp_path / "own", PROJECT)
    assert find_commit(tmp_path / "own") == commit
    (tmp_path / "own" / "runs").mkdir()
    (tmp_path / "own" / "runs" / "results.json").touch()  # outputs are no change of the code
    assert find_commit(tmp_path / "own") == commit
    (tmp_path / "own" / "pyproject.toml").write_text(PROJECT + "\n")
    assert find_commit(tmp_path / "own") == f"{commit}-dirty"


@pytest.mark.parametrize("project", ["", PROJECT, '[project]\nname = "theirs"\n'])
def test_no_commit_of_a_repository_around_an_installed_package(tmp_path, project):
    checkout(tmp_path / "theirs", project)
    installed = tmp_path / "theirs" / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    assert find_commit(installed) is None


def test_no_commit_of_another_project_or_without_a_repository(tmp_path):
    checkout(tmp_path / "theirs", '[project]\nname = "theirs"\n')
    assert find_commit(tmp_path / "theirs") is None
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "pyproject.toml").write_text(PROJECT)
    assert find_commit(tmp_path / "copied") is None
