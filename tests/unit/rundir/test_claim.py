"""No run is lost under another one: what a folder is of, its default name, and what --replace removes."""

import re
from pathlib import Path

import pytest

from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.rundir.claim import Purpose, claimed, default_folder, model_name
from qdqbench.quantize.rundir.remove import KINDS, MARK, remove_made

RUN = Purpose(kind="run", recipe="bert-int8-linears", model="/m/one", model_sha256="1", task="sst2")


def begun(folder: Path, purpose: Purpose = RUN, *names: str) -> None:
    """A folder in which a command left these files."""
    with claimed(folder, purpose):
        for name in ("results.json", *names):
            files.write_text(folder / name, "1234")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"recipe": "bert-fp16"}, "asked for is recipe bert-fp16"),
        ({"model": "/n/one", "model_sha256": "2"}, "asked for is model /n/one"),
        ({"task": "cola"}, "asked for is task cola"),
        ({"model": None, "model_sha256": None, "task": "embedded"}, "asked for is the embedded default"),
        ({"kind": "methods"}, "asked for is a table of methods of recipe bert-int8-linears, model /m/one"),
    ],
)
def test_another_recipe_model_task_or_command_is_refused(
    tmp_path: Path, change: dict[str, str], told: str
) -> None:
    folder = tmp_path / "run"
    begun(folder)
    with pytest.raises(UserError) as caught, claimed(folder, RUN.model_copy(update=change)):
        pass
    said = str(caught.value)
    assert "holds a finished run of recipe bert-int8-linears, model /m/one, task sst2, and" in said
    assert re.search(rf"{told}.*; give another --out, or --replace to remove that and start anew$", said)
    assert (folder / "results.json").read_text() == "1234"


@pytest.mark.parametrize(
    "change",
    [{}, {"model": "/moved/one"}, {"model_sha256": "trained on"}],
    ids=["the same", "model moved", "model trained on in its place"],
)
def test_the_same_goes_on(tmp_path: Path, change: dict[str, str]) -> None:
    begun(tmp_path / "run")
    with claimed(tmp_path / "run", RUN.model_copy(update=change)):
        assert (tmp_path / "run" / "results.json").is_file()


def test_replace_removes_what_was_made_and_nothing_else(tmp_path: Path) -> None:
    folder, other, told = tmp_path / "run", RUN.model_copy(update={"recipe": "bert-fp16"}), list[str]()
    script = "print()"
    begun(folder, RUN, "logits/fp32.npz", "engine/model.int8.engine", "bench/x.engine", "deploy/infer.py")
    (folder / "deploy" / "mine.py").write_text(script)
    digest = files.sha256(folder / "deploy" / "infer.py")
    (folder / "deploy" / "SHA256SUMS").write_text(f"{digest}  infer.py\n{digest}  mine.py\n")
    (folder / "notes.txt").write_text("mine")
    (folder / "engine" / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "report.html").write_text("mine")
    (folder / "bench" / "link").symlink_to(tmp_path / "elsewhere")
    with claimed(folder, other, replace=True, say=told.append):
        left = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert left == [".lock", ".lock.json", MARK, "deploy/mine.py", "engine/notes.txt", "notes.txt"]
    assert not (folder / "bench").exists()
    assert (tmp_path / "elsewhere" / "report.html").read_text() == "mine"
    (line,) = told
    assert re.fullmatch(
        r".*: removed a finished run of recipe bert-int8-linears, model /m/one, task sst2: 7 files, \S+ MB; "
        r"kept deploy/mine\.py, engine/notes\.txt, notes\.txt, not made by qdqbench",
        line,
    )


@pytest.mark.parametrize("replace", [False, True])
def test_nothing_is_removed_before_what_is_asked_can_be_done(tmp_path: Path, replace: bool) -> None:
    folder = tmp_path / "run"
    begun(folder)

    def ready() -> None:
        raise UserError("no such data")

    with pytest.raises(UserError, match="no such data"), claimed(folder, RUN, replace=replace, ready=ready):
        (folder / "results.json").unlink()
    assert (folder / "results.json").is_file()


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_of_somebody_else_is_never_touched(tmp_path: Path, replace: bool) -> None:
    (tmp_path / "thesis.txt").touch()
    with (
        pytest.raises(UserError, match="holds other files than a run"),
        claimed(tmp_path, RUN, replace=replace),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("there", [False, True])
def test_what_comes_to_nothing_leaves_nothing(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "runs" / "deep" / "run"
    if there:
        folder.mkdir(parents=True)

    def fails() -> None:
        with claimed(folder, RUN):
            files.write_text(folder / "run.json", "what was asked")
            (folder / "work").mkdir()
            raise UserError("mistyped")

    with pytest.raises(UserError, match="mistyped"):
        fails()
    assert [*tmp_path.rglob("*")] == ([folder.parent.parent, folder.parent, folder] if there else [])


def test_what_was_begun_stays(tmp_path: Path) -> None:
    def fails() -> None:
        with claimed(tmp_path / "run", RUN):
            files.write_text(tmp_path / "run" / "stages.json", "{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", MARK, "stages.json"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_process_was_writing_goes_too(tmp_path: Path, kind: str) -> None:
    half = tmp_path / ".model.onnx.abc.tmp" / "model.onnx"
    half.parent.mkdir()
    half.touch()
    assert remove_made(tmp_path, kind).count == 1
    assert not half.parent.exists()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("textattack/bert-base-uncased-SST-2", "bert-base-uncased-SST-2"),
        ("runs/finetune-minilm-mrpc/seed-0/model", "finetune-minilm-mrpc-seed-0"),
        ("trained/checkpoint-500", "trained-checkpoint-500"),
        ("model", "model"),
        ("a b/c:d", "c-d"),
    ],
)
def test_names_of_models(model: str, name: str) -> None:
    assert model_name(model) == name


def test_default_folders_carry_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_folder("run", "x/m", "r", "t") == Path("runs/m-r-t")
    assert default_folder("methods", "x/m", "r", "t") == Path("runs/methods-m-r-t")
    assert default_folder("run", None, "r", "embedded") == Path("runs/r-embedded")
    here = tmp_path / "my model"
    here.mkdir()
    monkeypatch.chdir(here)
    assert default_folder("finetune", ".", "t") == Path("runs/finetune-my-model-t")
