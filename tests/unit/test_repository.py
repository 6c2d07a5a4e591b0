"""Files for those around the code: workflows, issue forms, hooks, container, citation."""

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from ..support.commands import COMMANDS, find_command
from ..support.prose import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))  # without config.yml
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def field(name):
    """Return a text of pyproject.toml."""
    return str(PROJECT["project"][name])


def files_of(command):
    """Words of a command that name files of the repository; `dist` is what a build writes."""
    words = (word for line in command.splitlines() for word in shlex.split(line))
    return {
        word for word in words if re.search(r"/|\.(py|txt|toml|sh)$", word) and not word.startswith("dist/")
    }


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_step_of_a_workflow_names_files_that_exist(path):
    workflow = read(path)
    assert {"name", "on", "jobs", "permissions"} == set(workflow)  # `on` without quotes reads as True
    for name, job in workflow["jobs"].items():
        assert {*job.get("needs", ())} <= set(workflow["jobs"]), name
        assert ("uses" in job) != ("steps" in job), name
        for step in [job] if "uses" in job else job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            used = step.get("uses", "")
            assert (ROOT / used).is_file() if used.startswith("./") else not used or "@" in used, step
            assert [file for file in files_of(step.get("run", "")) if not (ROOT / file).is_file()] == [], step


def test_ci_runs_the_checks_on_each_python_that_is_allowed():
    job = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]
    assert {".ci/run"} == {file for step in job["steps"] for file in files_of(step.get("run", ""))}
    allowed = SpecifierSet(field("requires-python"))
    assert job["strategy"]["matrix"]["python"] == [f"3.{n}" for n in range(40) if f"3.{n}" in allowed]


def test_only_a_tested_tag_is_published_without_a_stored_token():
    workflow = read(ROOT / ".github" / "workflows" / "publish.yml")
    jobs, publish = workflow["jobs"], workflow["jobs"]["publish"]
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    assert {jobs[name].get("uses") for name in publish["needs"]} == {"./.github/workflows/ci.yml", None}
    assert publish["permissions"] == {"id-token": "write"}
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", ())] == ["publish"]
    assert "secrets." not in str(workflow)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_forms_need(path):
    form = read(path)
    assert set(form) == {"name", "description", "labels", "body"}
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in form["body"]} <= FIELDS
    assert all(part["attributes"]["label"] and part["id"] for part in asked)
    assert len({part["id"] for part in asked}) == len(asked)
    assert any(part.get("validations", {}).get("required") for part in asked)
    commands = re.findall(r"`qdqbench ([^`]+)`", path.read_text(encoding="utf-8"))
    assert [command for command in commands if not exists(command)] == []
    assert "doctor --json" in commands


def exists(command):
    """Whether the command line has a command with these options."""
    words = command.split()
    found, options = COMMANDS[find_command(words)], {word for word in words if word.startswith("-")}
    return not hasattr(found, "commands") and options <= {each for one in found.params for each in one.opts}


def test_a_command_that_is_not_there_is_seen():
    assert exists("recipes new --model MODEL")
    assert not exists("recipes knew")
    assert not exists("doctor --yaml")


@pytest.mark.parametrize("name", ["bench", "bug"])
def test_a_report_requires_what_doctor_says(name):
    form = next(each for each in FORMS if each.stem == name)
    (doctor,) = (part for part in read(form)["body"] if part.get("id") == "doctor")
    assert doctor["validations"] == {"required": True}


def test_hooks_before_a_commit_are_those_of_ci():
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    entries = [shlex.split(hook["entry"]) for hook in hooks]
    checks = (ROOT / "dev.py").read_text(encoding="utf-8")
    for entry in entries:
        assert entry[1] in re.findall(r'"([\w./]+)"', checks), entry
    assert {hook["language"] for hook in hooks} == {"system"}
    assert {file for hook in hooks for file in files_of(hook["entry"])} == {"tools/check_types.py"}


def test_the_citation_is_of_this_version():
    citation = read(ROOT / "CITATION.cff")
    assert (citation["version"], citation["license"]) == (field("version"), field("license"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_the_container_has_both_targets_and_installs_what_is_there():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE)
    names = [name for _, name in stages]
    assert names[-2:] == ["gpu", "cpu"]
    assert all(parent in names[:place] or ":" in parent for place, (parent, _) in enumerate(stages))
    copied = re.findall(r"^COPY (\S+) ", text, re.MULTILINE)
    assert [path for path in copied if not (ROOT / path).exists()] == []
    extras = {extra for listed in re.findall(r"\.whl\)\[([\w,]+)\]", text) for extra in listed.split(",")}
    assert extras <= PROJECT["project"]["optional-dependencies"].keys()
    assert {"quantize", "rtx", "openvino", "serve"} == extras


def test_the_container_gets_every_tracked_file():
    """Without one of them git calls the checkout dirty, and the wheel its commit."""
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-from=.dockerignore"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is not a checkout")
    assert done.stdout == ""
