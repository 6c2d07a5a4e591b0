"""The scripts of every kind of task are small and right Python; TensorRT's runs on a fake GPU."""

import ast
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qdqbench.quantize.deployment.write import ANSWERS, describe_texts, render
from qdqbench.quantize.tasks.task import TASK_KINDS
from qdqbench.quantize.utils.system.cpu import INT8_DOT

from ...support import fake_gpu

MOST_LINES = {
    "run_onnxruntime.py": 15,
    "run_openvino.py": 15,
    "run_cuda.py": 15,
    "run_tensorrt.py": 30,
}  # that do something
TOLD = {
    "inputs": ["input_ids", "attention_mask", "token_type_ids"],
    "outputs": {"logits": "float32"},
    "labels": ["bad", "good"],
    "max_length": 32,
    "stride": 0,
    "truncation": "longest_first",
    "pad_id": 9,
    "batch": 2,
    "failed": "",
}


def scripts(kind: str, gpu: bool = True) -> dict[str, str]:
    """Every script of a kind of task."""
    context = describe_texts(TASK_KINDS[kind], TASK_KINDS[kind].text_columns[0])
    context |= {
        "gpu": gpu,
        "backend": "tensorrt_rtx",
        "title": "TensorRT-RTX",
        "version": "1-a",
        "int8_dot": INT8_DOT,
        "shared_layers": not gpu,
    }
    return {name: render(name, context) for name in ("model.py", *MOST_LINES)}


def effective(source: str) -> int:
    """Lines of statements, without docstrings and comments."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        told = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not told:
            lines.add(node.lineno)
    return len(lines)


def test_every_kind_of_task_has_an_answer():
    assert {*ANSWERS} == {*TASK_KINDS}


@pytest.mark.parametrize("shared", [False, True])
def test_weights_that_layers_share_are_not_made_uint8(shared):
    script = scripts("classification", gpu=not shared)["run_onnxruntime.py"]
    assert ("x64quantprecision" in script, "ORT_DISABLE_ALL" in script) == (not shared, shared)


@pytest.mark.parametrize("kind", ANSWERS)
def test_scripts_are_small_and_lint_clean(kind, tmp_path):
    for gpu in (True, False):
        made = scripts(kind, gpu)
        assert ("def fitted" in made["model.py"]) == gpu
        for name, source in made.items():
            assert effective(source) <= MOST_LINES.get(name, 80 + 15 * TASK_KINDS[kind].windows), name
            assert "qdqbench" not in source
            (tmp_path / name).write_text(source)
        command = [Path(sys.executable).parent / "ruff", "--isolated"]
        checked = ["check", "--select=E,F,W,B,UP,SIM,RET,D1", "--target-version=py310"]
        for arguments in (checked, ["format", "--check"]):
            done = subprocess.run(
                [*command, *arguments, "--line-length=110", "--no-cache", tmp_path],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout


@pytest.fixture(params=["classification"])
def deployed(request, tmp_path, monkeypatch):
    """Folder with the scripts of a kind of task, a tokenizer of single words, and an engine that is none."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"[UNK]": 0, "a": 1, "good": 2, "film": 3, "[CLS]": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=[("[CLS]", 4)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, source in scripts(request.param).items():
        (tmp_path / name.replace("tensorrt", "tensorrt_rtx")).write_text(source)
    about = TOLD
    if TASK_KINDS[request.param].windows:
        outputs = dict.fromkeys(("start_logits", "end_logits"), "float32")
        about = TOLD | {"outputs": outputs, "stride": 10, "truncation": "only_second"}
    (tmp_path / "tensorrt_rtx.engine").write_bytes(b"engine")
    tell(tmp_path, about)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("model", "run_tensorrt_rtx"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    sys.modules.pop("model", None)


def tell(folder: Path, about: dict) -> None:
    (folder / "model.json").write_text(json.dumps(about))
    names = ("model.json", "tokenizer.json", "tensorrt_rtx.engine")
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def loaded(folder: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replace_engine(folder: Path, data: bytes) -> None:
    """As `build_tensorrt.sh` does."""
    (folder / "tensorrt_rtx.engine").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    (folder / "tensorrt_rtx.engine.sha256").write_text(f"{digest}  tensorrt_rtx.engine\n")


class TestTensorRT:
    NAMES = {"input_ids": "ids", "attention_mask": "mask"}  # here, in the fake engine

    @pytest.fixture
    def gpu(self, monkeypatch):
        state = fake_gpu.install(monkeypatch, [((1, 16), (1, 16), (1, 16)), ((2, 8), (2, 24), (4, 32))])
        names = self.NAMES

        class Context(fake_gpu.Context):
            def set_input_shape(self, name, shape):
                return name not in names or super().set_input_shape(names[name], shape)

            def set_tensor_address(self, name, address):
                return super().set_tensor_address(names.get(name, name), address)

        class CudaEngine(fake_gpu.CudaEngine):
            def create_execution_context(self):
                return Context("plain")

        monkeypatch.setattr(fake_gpu, "CudaEngine", CudaEngine)
        trt = fake_gpu.module("tensorrt_rtx")
        trt.Logger = lambda severity: SimpleNamespace(log=lambda severity, text: None)
        trt.Logger.WARNING = 2
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", trt)
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
        return state

    def test_it_answers_with_the_profile_that_pads_least(self, deployed, gpu):
        script = loaded(deployed, "run_tensorrt_rtx")
        made = script.infer({name: np.ones((1, 5), dtype=np.int64) for name in TOLD["inputs"]})
        assert made["logits"].tolist() == [[5, 16]]  # sum of ids under the mask, length: profile 0
        made = script.infer({name: np.ones((1, 17), dtype=np.int64) for name in TOLD["inputs"]})
        assert made["logits"].tolist() == [[17, 32]]  # in a batch of two, as profile 1 asks
        made = script.infer({name: np.ones((3, 4), dtype=np.int64) for name in TOLD["inputs"]})
        assert made["logits"].tolist() == [[4, 16]] * 3

    def test_texts_are_read_in_batches(self, deployed, gpu):
        script = loaded(deployed, "run_tensorrt_rtx")
        import model

        texts = ["a good film", "a", "film", "good good good"]
        made = model.predict(script.infer, texts)
        sums = np.array([[4 + 1 + 2 + 3, 16], [5, 16], [7, 16], [10, 16]], dtype=np.float64)
        shares = np.exp(sums - np.logaddexp.reduce(sums, axis=1, keepdims=True))
        np.testing.assert_allclose([[*each["scores"].values()] for each in made], shares)
        assert gpu.enqueued == 2
        assert [each["label"] for each in made] == ["good"] * 4

    def test_an_engine_of_another_gpu_is_told(self, deployed, gpu):
        replace_engine(deployed, b"foreign")
        with pytest.raises(SystemExit, match=r"for another GPU or TensorRT-RTX: see README.md"):
            loaded(deployed, "run_tensorrt_rtx")

    def test_another_engine_is_not_loaded_but_one_that_was_built_here_is(self, deployed, gpu):
        (deployed / "tensorrt_rtx.engine").write_bytes(b"evil")
        with pytest.raises(SystemExit, match="is not what was deployed or built here"):
            loaded(deployed, "run_tensorrt_rtx")
        replace_engine(deployed, b"evil")
        assert loaded(deployed, "run_tensorrt_rtx").engine is not None

    def test_an_engine_that_fails_is_no_answer(self, deployed, gpu):
        script = loaded(deployed, "run_tensorrt_rtx")
        gpu.fails = True
        with pytest.raises(RuntimeError, match="failed to run"):
            script.infer({name: np.ones((1, 5), dtype=np.int64) for name in TOLD["inputs"]})


def test_a_failed_run_warns_with_each_use(deployed, monkeypatch, capsys):
    tell(deployed, TOLD | {"failed": "the drop is 0.2"})
    model = loaded(deployed, "model")
    monkeypatch.setattr(sys, "argv", ["run.py", "a film"])
    model.main(lambda tokens: {"logits": np.zeros((1, 2), dtype=np.float32)})
    told = capsys.readouterr()
    assert told.err == "warning: not for use, the drop is 0.2\n"
    assert json.loads(told.out) == {"label": "bad", "scores": {"bad": 0.5, "good": 0.5}}


@pytest.mark.parametrize("name", ["model.json", "tokenizer.json", "SHA256SUMS"])
def test_no_file_that_changed_or_went_is_used(deployed, name):
    with (deployed / name).open("a") as stream:
        stream.write(" ")
    if name != "SHA256SUMS":
        with pytest.raises(
            SystemExit, match=f"{name} is not what was deployed or built here: see SHA256SUMS"
        ):
            loaded(deployed, "model")
    (deployed / name).unlink()
    with pytest.raises(SystemExit, match=f"No such file or directory: '.*{name}'"):
        loaded(deployed, "model")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_answer_that_is_no_number_is_an_error(deployed, monkeypatch, bad):
    model = loaded(deployed, "model")
    monkeypatch.setattr(sys, "argv", ["run.py", "a film"])
    with pytest.raises(SystemExit, match="answers NaN or infinity"):
        model.main(lambda tokens: {"logits": np.array([[0, bad]], dtype=np.float32)})


@pytest.mark.parametrize("deployed", ["question answering"], indirect=True)
def test_padding_may_have_any_answer(deployed):
    def infer(tokens):
        logits = np.where(tokens["attention_mask"], 1, np.nan).astype(np.float32)
        return {"start_logits": logits, "end_logits": logits}

    model = loaded(deployed, "model")
    made = model.predict(infer, [("a", "good film film"), ("a", "good")])
    assert [each["score"] for each in made] == [2, 2]


@pytest.mark.parametrize("deployed", ["question answering"], indirect=True)
def test_a_context_of_too_many_windows_is_refused_before_they_are_made(deployed, monkeypatch):
    model, rows = loaded(deployed, "model"), []

    def infer(tokens):
        rows.extend(tokens["input_ids"])
        return dict.fromkeys(model.OUTPUTS, np.zeros(tokens["input_ids"].shape, dtype=np.float32))

    long = "good " * 18  # leaves a window 13 tokens, of which it shares 10
    model.predict(infer, [(long, "film " * (13 + 255 * 3))])
    assert len(rows) == model.MOST_WINDOWS == 256
    for question, words in ((long, 13 + 255 * 3 + 1), ("good " * 21, 100)):
        monkeypatch.setattr(model, "tokenizer", None)
        with pytest.raises(ValueError, match=r"the context of 'good .*' would be read in more than 256"):
            model.predict(infer, [(question, "film " * words)])
        monkeypatch.setattr(sys, "argv", ["run.py", question, "film " * words])
        with pytest.raises(SystemExit, match="more than 256 windows; give a shorter context or question"):
            model.main(infer)
