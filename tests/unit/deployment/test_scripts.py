"""The scripts of every kind of task are small and right Python; TensorRT's runs on a fake GPU."""

import ast
import hashlib
import json
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from qdqbench.quantize.deployment.write import describe_texts, render, standalone_modules
from qdqbench.quantize.standalone import runtimes
from qdqbench.quantize.standalone.answers import ANSWERS, Rows
from qdqbench.quantize.standalone.model import Model, open_folder
from qdqbench.quantize.standalone.texts import MOST_WINDOWS, Refused
from qdqbench.quantize.tasks.task import TASK_KINDS

from ...support import fake_gpu

TOLD = {
    **describe_texts(TASK_KINDS["classification"], 1, 32),
    "inputs": ["input_ids", "attention_mask", "token_type_ids"],
    "outputs": {"logits": "float32"},
    "labels": ["bad", "good"],
    "prompt": "",
    "side": "right",
    "pad_id": 9,
    "batch": 2,
    "failed": "",
}


def test_every_kind_of_task_has_an_answer():
    assert {*ANSWERS} == {*TASK_KINDS}


def test_a_question_without_a_context_has_an_answer_in_json():
    coded = SimpleNamespace(offsets=[(0, 0), (0, 2), (0, 0), (0, 0)], sequence_ids=[None, 0, None, None])
    rows = Rows(np.array([0]), [coded], [np.full((4, 2), 0.5, np.float32)])
    made = ANSWERS["question answering"]([("Is", "")], rows, [])
    expected = {"answer": "", "score": 1.0, "score_without_answer": 1.0}
    assert json.loads(json.dumps(made, allow_nan=False)) == [expected]


def test_what_is_copied_needs_nothing_of_ours(tmp_path):
    context = {"backend": "openvino", "title": "OpenVINO", "script": "run.py", "example": '"a text"'}
    (tmp_path / "run.py").write_text(render("run.py", context))
    allowed = {"tokenizers", "numpy", *sys.stdlib_module_names}
    for name, source in standalone_modules().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(source)
        more = {"httptools", "msgspec"} if "/server/" in name else set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                assert {each.name.partition(".")[0] for each in node.names} <= allowed | more, name
            elif isinstance(node, ast.ImportFrom):
                assert node.level or str(node.module).partition(".")[0] in allowed | more, name
    command = [Path(sys.executable).parent / "ruff", "--isolated"]
    checked = ["check", "--select=E,F,W,B,UP,SIM,RET", "--target-version=py310"]
    for arguments in (checked, ["format", "--check"]):
        options = ["--line-length=110", "--no-cache", tmp_path]
        done = subprocess.run([*command, *arguments, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("shared", [False, True])
def test_weights_that_layers_share_are_not_made_uint8(shared, tmp_path, monkeypatch):
    made = {}
    options = SimpleNamespace(add_session_config_entry=lambda name, value: made.update({name: value}))
    ort = types.ModuleType("onnxruntime")
    ort.SessionOptions = lambda: options
    ort.GraphOptimizationLevel = SimpleNamespace(ORT_DISABLE_ALL=0, ORT_ENABLE_ALL=9)
    ort.InferenceSession = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "onnxruntime", ort)
    monkeypatch.setattr(runtimes, "CPU", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags : sse avx2")
    told = TOLD | {"onnxruntime": "ORT_ENABLE_ALL", "int8_dot": ["vnni"], "shared_layers": shared}
    (tmp_path / "model.onnx").write_bytes(b"graph")
    seal(tmp_path, "model.onnx")
    runtimes.open_runtime("onnxruntime", tmp_path, told)
    expected = ({}, 0) if shared else ({"session.x64quantprecision": "1"}, 9)
    assert (made, options.graph_optimization_level) == expected


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
    kind = TASK_KINDS[request.param]
    about = TOLD | describe_texts(kind, kind.text_columns[0], 32)
    if kind.windows:
        about["outputs"] = dict.fromkeys(("start_logits", "end_logits"), "float32")
    (tmp_path / "tensorrt_rtx.engine").write_bytes(b"engine")
    tell(tmp_path, about)
    return tmp_path


def seal(folder: Path, *names: str, sums: str = "SHA256SUMS") -> None:
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    (folder / sums).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def tell(folder: Path, about: dict) -> None:
    (folder / "model.json").write_text(json.dumps(about))
    seal(folder, "model.json", "tokenizer.json", "tensorrt_rtx.engine")


def replace_engine(folder: Path, data: bytes) -> None:
    """As `build_tensorrt.sh` does."""
    (folder / "tensorrt_rtx.engine").write_bytes(data)
    seal(folder, "tensorrt_rtx.engine", sums="tensorrt_rtx.engine.sha256")


class TestTensorRT:
    @pytest.fixture
    def gpu(self, monkeypatch):
        state = fake_gpu.install(monkeypatch, [((1, 16), (1, 16), (1, 16)), ((2, 8), (2, 24), (4, 32))])
        trt = fake_gpu.module("tensorrt_rtx")
        trt.Logger = lambda severity: SimpleNamespace(log=lambda severity, text: None)
        trt.Logger.WARNING = 2
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", trt)
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
        return state

    def test_it_answers_with_the_profile_that_pads_least(self, deployed, gpu):
        infer = open_folder(deployed, "tensorrt_rtx").infer
        for shape, expected in (
            ((1, 5), [[5, 16]]),  # sum of ids under the mask, length: profile 0
            ((1, 17), [[17, 32]]),  # in a batch of two, as profile 1 asks
            ((3, 4), [[4, 16]] * 3),
        ):
            assert infer(dict.fromkeys(TOLD["inputs"], np.ones(shape, np.int64))).tolist() == expected

    def test_texts_are_read_in_batches(self, deployed, gpu):
        model = open_folder(deployed, "tensorrt_rtx")
        texts = ["a good film", "a", "film", "good good good"]
        made = model.predict(texts)
        sums = np.array([[4 + 1 + 2 + 3, 16], [5, 16], [7, 16], [10, 16]], dtype=np.float64)
        shares = np.exp(sums - np.logaddexp.reduce(sums, axis=1, keepdims=True))
        np.testing.assert_allclose([[*each["scores"].values()] for each in made], shares)
        assert gpu.enqueued == 2
        assert [each["label"] for each in made] == ["good"] * 4

    def test_an_engine_of_another_gpu_is_told(self, deployed, gpu):
        replace_engine(deployed, b"foreign")
        with pytest.raises(SystemExit, match=r"for another GPU or version of tensorrt_rtx: see README.md"):
            open_folder(deployed, "tensorrt_rtx")

    def test_another_engine_is_not_loaded_but_one_that_was_built_here_is(self, deployed, gpu):
        (deployed / "tensorrt_rtx.engine").write_bytes(b"evil")
        with pytest.raises(SystemExit, match="is not what was deployed or built here"):
            open_folder(deployed, "tensorrt_rtx")
        replace_engine(deployed, b"evil")
        assert open_folder(deployed, "tensorrt_rtx").infer is not None

    def test_an_engine_that_fails_is_no_answer(self, deployed, gpu):
        model = open_folder(deployed, "tensorrt_rtx")
        gpu.fails = True
        with pytest.raises(RuntimeError, match="failed to run"):
            model.infer(dict.fromkeys(TOLD["inputs"], np.ones((1, 5), np.int64)))


def a_model(folder: Path, infer) -> Model:
    told = json.loads((folder / "model.json").read_text())
    return Model(told, Tokenizer.from_file(str(folder / "tokenizer.json")), infer)


def test_a_failed_run_warns_with_each_use(deployed, monkeypatch, capsys):
    tell(deployed, TOLD | {"failed": "the drop is 0.2"})
    monkeypatch.setattr(sys, "argv", ["run.py", "a film"])
    a_model(deployed, lambda tokens: np.zeros((1, 2), dtype=np.float32)).main()
    told = capsys.readouterr()
    assert told.err == "warning: not for use, the drop is 0.2\n"
    assert json.loads(told.out) == {"label": "bad", "scores": {"bad": 0.5, "good": 0.5}}


CHANGED = r"%s is not what was deployed or built here: see SHA256SUMS"
GONE = r"%s: No such file or directory; deploy the run again"


@pytest.mark.parametrize(
    ("name", "data", "told"),  # None: it is gone
    [
        *((name, b"{} ", CHANGED % name) for name in ("model.json", "tokenizer.json")),
        ("SHA256SUMS", b"\xff\xfe\n", CHANGED % "model.json"),  # no text
        *((name, None, GONE % name) for name in ("model.json", "tokenizer.json", "SHA256SUMS")),
    ],
)
def test_no_file_that_changed_or_went_is_used(deployed, name, data, told):
    (deployed / name).unlink()
    if data is not None:
        (deployed / name).write_bytes(data)
    with pytest.raises(SystemExit, match=told):
        open_folder(deployed, "onnxruntime")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_answer_that_is_no_number_is_an_error(deployed, monkeypatch, bad):
    monkeypatch.setattr(sys, "argv", ["run.py", "a film"])
    with pytest.raises(SystemExit, match="answers NaN or infinity"):
        a_model(deployed, lambda tokens: np.array([[0, bad]], dtype=np.float32)).main()


@pytest.mark.parametrize("deployed", ["question answering"], indirect=True)
def test_padding_may_have_any_answer(deployed):
    def infer(tokens):
        logits = np.where(tokens["attention_mask"], 1, np.nan).astype(np.float32)
        return np.stack([logits, logits], axis=-1)

    made = a_model(deployed, infer).predict([("a", "good film film"), ("a", "good")])
    assert [each["score"] for each in made] == [2, 2]


def test_rows_of_like_length_share_a_batch_and_answers_keep_their_order(deployed):
    seen = []

    def infer(tokens):
        seen.append(tokens["input_ids"].shape)
        return np.stack([tokens["attention_mask"].sum(axis=1), np.zeros(len(tokens["input_ids"]))], axis=1)

    made = a_model(deployed, infer).predict(["a " * count for count in (9, 1, 8, 2)])
    assert seen == [(2, 10), (2, 4)]  # of even length
    order = [each["scores"]["bad"] for each in made]
    assert sorted(range(4), key=lambda place: -order[place]) == [0, 2, 3, 1]


@pytest.mark.parametrize("deployed", ["question answering"], indirect=True)
def test_a_context_of_too_many_windows_is_refused_before_they_are_made(deployed, monkeypatch):
    rows = []

    def infer(tokens):
        rows.extend(tokens["input_ids"])
        return np.zeros((*tokens["input_ids"].shape, 2), dtype=np.float32)

    model = a_model(deployed, infer)
    long = "good " * 18  # leaves a window 13 tokens, of which it shares 10
    model.predict([(long, "film " * (13 + 255 * 3))])
    assert len(rows) == MOST_WINDOWS == 256
    for question, words in ((long, 13 + 255 * 3 + 1), ("good " * 21, 100)):
        monkeypatch.setattr(model.encoder, "_encode", None)
        with pytest.raises(Refused, match=r"the context of 'good .*' would be read in more than 256"):
            model.predict([(question, "film " * words)])
        monkeypatch.setattr(sys, "argv", ["run.py", question, "film " * words])
        with pytest.raises(SystemExit, match="more than 256 windows; give a shorter context or question"):
            model.main()
