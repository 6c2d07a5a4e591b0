"""A run as a model repository of Triton: parsed by Triton's own messages, run under a stub of its API."""

import ast
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import yaml
from filelock import FileLock, Timeout

from qdqbench.quantize.deployment.triton import export
from qdqbench.quantize.deployment.triton.export import export_triton
from qdqbench.quantize.engine.cpu_runtimes import compile_model
from qdqbench.quantize.engine.sidecar import read_sidecar, sidecar_path
from qdqbench.quantize.pipeline.ownership import LOCK
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.utils.errors import UserError

from ..support import triton_stub
from ..support.triton_stub import InferenceRequest, Repository, Tensor
from .served import record
from .tiny import refused

pytestmark = pytest.mark.skipif(
    not (triton_stub.BINDINGS / "tritonclient").is_dir(), reason="needs tools/fetch_bindings.sh"
)


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("triton") / "out"
    export_triton(finished_run, out, "sst2")
    return out


@pytest.fixture
def repository(exported) -> Repository:
    return Repository(exported / "models")


def column(texts):
    return np.array([[text.encode()] for text in texts], dtype=np.object_)


def test_the_chain_answers_as_the_run_did(repository, finished_run):
    session = Session(read_config(finished_run), finished_run)
    split, _ = session.eval_splits["validation"]
    texts = split.dataset["sentence"][:40]
    with np.load(finished_run / "logits" / "onnxruntime.npz") as saved:
        known = saved["validation.logits"][:40]
    for start in (0, 1, 33):  # other batches, other padding
        rows = slice(start, start + 7)
        for model in ("sst2", "sst2_on_onnxruntime", "sst2_on_openvino"):
            made = repository.run(model, {"TEXT": column(texts[rows])})
            np.testing.assert_allclose(made["logits"], known[rows], atol=2e-2)
            assert (made["logits"].argmax(axis=1) == known[rows].argmax(axis=1)).all()


def test_openvino_takes_a_graph_for_tensorrt_too(exported, repository):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'qdqbench[openvino]'")
    graph = (exported / "models" / "sst2_openvino" / "1" / "model.onnx").read_bytes()
    tokens = repository.run("sst2_tokenizer", {"TEXT": column(["a good film", "awful"])})
    made = compile_model("openvino", graph, blob=False, compute="fp32").run(tokens)
    known = repository.run("sst2_onnxruntime", tokens)
    np.testing.assert_allclose(made["logits"], known["logits"], atol=5e-2)


def test_its_tokens_are_those_of_the_run(repository, finished_run):
    tokenizer = Session(read_config(finished_run), finished_run).tokenizer
    texts = ["a good film", "", "the " * 300, "Ünknown wörds 漢字 \u202e x", "it is\tof\nthe   plot!"]
    made = repository.run("sst2_tokenizer", {"TEXT": column(texts)})
    wanted = tokenizer(texts, truncation=True, max_length=128, return_token_type_ids=True)
    for row in range(len(texts)):
        kept = made["attention_mask"][row] == 1
        for name in ("input_ids", "token_type_ids"):
            assert made[name][row][kept].tolist() == wanted[name][row]
        assert (made["input_ids"][row][~kept] == tokenizer.pad_token_id).all()
    assert made["input_ids"].shape == (5, 128)
    assert repository.run("sst2_tokenizer", {"TEXT": column(["a"])})["input_ids"].shape == (1, 16)


def test_a_text_that_cannot_be_read_has_an_error_of_its_own(repository):
    config = repository.configs["sst2_tokenizer"]
    model = repository.python_model("sst2_tokenizer", config)
    bad = np.array([[b"\xff\xfe"]], dtype=np.object_)
    long = column(["a" * 300_000])
    answers = model.execute([InferenceRequest([Tensor("TEXT", each)]) for each in (bad, column(["a"]), long)])
    assert [answer.error() is not None for answer in answers] == [True, False, True]
    assert "cannot be read" in str(answers[0].error())
    # as for a question that leaves no room for its context
    model.encoder = type(model.encoder)(model.encoder.tokenizer, 8, truncation="only_second")
    model.inputs = ["TEXT", "TEXT_PAIR"]
    texts = ("who", "a " * 50)
    pairs = [[Tensor("TEXT", column([text])), Tensor("TEXT_PAIR", column(["me"]))] for text in texts]
    answers = model.execute([InferenceRequest(pair) for pair in pairs])
    assert [answer.error() is not None for answer in answers] == [False, True]


def test_configurations_fit_each_other_and_the_engine(exported, repository, finished_run):
    profiles = read_sidecar(next((finished_run / "engine").glob("*.engine"))).profiles
    encoder = repository.configs["sst2_onnxruntime"]
    assert encoder.max_batch_size == max(profile.max[0] for profile in profiles)
    assert [each.name for each in encoder.input] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [*encoder.input[0].dims] == [-1]
    assert [*encoder.output[0].dims] == [2]
    assert encoder.dynamic_batching.max_queue_delay_microseconds > 0
    assert repository.configs["sst2_tokenizer"].dynamic_batching.default_queue_policy.max_queue_size == 512
    names = ("", "_tokenizer", "_onnxruntime", "_openvino", "_on_onnxruntime", "_on_openvino")
    assert {*repository.configs} == {f"sst2{name}" for name in names}
    built = [triton_stub.read_config(path) for path in (exported / "tensorrt").rglob("config.pbtxt")]
    plan = next(config for config in built if config.platform == "tensorrt_plan")
    assert [*plan.instance_group[0].profile] == [str(number) for number, _ in enumerate(profiles)]
    for config in (*repository.configs.values(), *built):
        files = exported.rglob("config.pbtxt")
        folder = next(path.parent for path in files if path.parent.name == config.name)
        for output in config.output:
            if output.label_filename:
                assert len((folder / output.label_filename).read_text().splitlines()) == 2
        for sample in config.model_warmup:
            assert sample.batch_size <= config.max_batch_size
            for each in sample.inputs.values():
                if each.input_data_file:
                    data = np.frombuffer((folder / "warmup" / each.input_data_file).read_bytes(), np.int64)
                    assert data.tolist() == [1] * each.dims[0]
                    assert any(p.min[1] <= each.dims[0] <= p.max[1] for p in profiles)


def test_the_script_builds_a_plan_for_the_profiles(exported):
    script = exported / "tensorrt" / "build_plan.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    text = script.read_text()
    shape = "input_ids:{0},attention_mask:{0},token_type_ids:{0}"
    for option in (
        "--stronglyTyped",
        f"--minShapes={shape.format('1x16')}",
        f"--maxShapes={shape.format('128x128')}",
    ):
        assert option in text
    assert script.stat().st_mode & 0o100
    assert (exported / "tensorrt" / "model.onnx").is_file()


def test_a_run_with_an_engine_of_tensorrt_brings_its_plan(a_run, tmp_path):
    """The engine is made up to be one: nothing here loads it."""
    (engine,) = (a_run / "engine").glob("*.engine")
    for path in (a_run / "build.json", sidecar_path(engine)):
        told = json.loads(path.read_text()) | {"backend": "tensorrt", "version": "10.16.0.72"}
        path.write_text(json.dumps(told))
    record(a_run)
    made = export_triton(a_run, tmp_path / "out", "sst2")
    assert (made.plan, made.backend) == ("built", "tensorrt")
    models = tmp_path / "out" / "models"
    assert (models / "sst2_tensorrt" / "1" / "model.plan").read_bytes() == engine.read_bytes()
    config = triton_stub.read_config(models / "sst2_tensorrt" / "config.pbtxt")
    assert (config.platform, config.default_model_filename) == ("tensorrt_plan", "model.plan")
    asked = triton_stub.read_config(models / "sst2" / "config.pbtxt")
    assert asked.ensemble_scheduling.step[1].model_name == "sst2_tensorrt"
    assert "TensorRT 10.16.0.72" in (tmp_path / "out" / "README.md").read_text()
    patch = yaml.safe_load((tmp_path / "out" / "kubernetes" / "gpu-patch.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert not (tmp_path / "out" / "tensorrt").exists()
    engine.write_bytes(b"another")
    with pytest.raises(UserError, match=r"model\.int8\.engine changed since the run made it"):
        export_triton(a_run, tmp_path / "other", "sst2")
    record(a_run)
    with pytest.raises(UserError, match="is not the engine that was built from"):
        export_triton(a_run, tmp_path / "other", "sst2")


def test_deployment_files_are_yaml_that_fit_each_other(exported):
    documents = {}
    for path in [*exported.glob("*.y*ml"), *exported.glob("kubernetes/*.yaml")]:
        for each in yaml.safe_load_all(path.read_text()):
            documents[path.name, each.get("kind", "")] = each
    deployment = documents["deployment.yaml", "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert container["startupProbe"]["failureThreshold"] >= 10
    assert deployment["spec"]["replicas"] >= 2
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert documents["service.yaml", "Service"]["spec"]["selector"].items() <= labels.items()
    assert {each["targetPort"] for each in documents["service.yaml", "Service"]["spec"]["ports"]} == {*ports}
    scaler = documents["hpa.yaml", "HorizontalPodAutoscaler"]["spec"]
    keda = documents["keda.yaml", "ScaledObject"]["spec"]
    name = deployment["metadata"]["name"]
    assert (scaler["scaleTargetRef"]["name"], keda["scaleTargetRef"]["name"]) == (name, name)
    (rule,) = documents["prometheus-adapter.yaml", ""]["rules"]["custom"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    for query in (rule["metricsQuery"], keda["triggers"][0]["metadata"]["query"]):
        assert "nv_inference_queue_duration_us" in query
        assert query.count("(") == query.count(")")
    compose = documents["compose.yaml", ""]["services"]
    assert all(port.startswith("127.0.0.1:") for each in compose.values() for port in each["ports"])
    assert compose["triton"]["healthcheck"]
    assert "triton" in documents["compose.gpu.yaml", ""]["services"]
    start = (exported / "Dockerfile").read_text().partition("CMD ")[2]
    assert "--load-model=sst2" in start
    # nobody in a cluster loads a model, which could be code
    only = "model-repository,logging,trace,shared-memory:qdqbench-key=$(cat /proc/sys/kernel/random/uuid)"
    for part in (f'ONLY="{only}"', '--http-restricted-api="$ONLY"', '--grpc-restricted-protocol="$ONLY"'):
        assert part in start
    assert subprocess.run(["sh", "-n", "-c", start], check=False).returncode == 0
    policy = documents["service.yaml", "NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [[port["port"] for port in rule["ports"]] for rule in policy["ingress"]] == [[8000, 8001], [8002]]
    assert "egress" not in policy
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert deployment["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_clients_send_what_the_model_takes(exported, repository, protocol, monkeypatch, capsys):
    """Against a stand-in of the client library, which the environment does not have."""

    class Input:
        def __init__(self, name, shape, datatype):
            self.name, self.shape, self.datatype = name, shape, datatype

        def set_data_from_numpy(self, array):
            assert self.datatype == "BYTES"
            assert list(array.shape) == self.shape
            self.array = array

    class Client:
        def __init__(self, url):
            assert url == {"http": "localhost:8000", "grpc": "localhost:8001"}[protocol]

        def infer(self, model, inputs, *, outputs, timeout=None, client_timeout=None):
            made = repository.run(model, {each.name: each.array for each in inputs})
            assert {*outputs} <= {*made}
            return types.SimpleNamespace(as_numpy=made.get)

    module = types.ModuleType(f"tritonclient.{protocol}")
    module.InferInput, module.InferenceServerClient, module.InferRequestedOutput = Input, Client, str
    package = types.ModuleType("tritonclient")
    setattr(package, protocol, module)
    monkeypatch.setitem(sys.modules, "tritonclient", package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["client", "a good film", "awful plot"])
    source = (exported / f"client_{protocol}.py").read_text()
    assert ast.get_docstring(ast.parse(source))
    exec(compile(source, "client.py", "exec"), {"__name__": "__main__"})
    told = capsys.readouterr().out
    assert "logits float32 (2, 2)" in told
    assert [line.split()[0] for line in told.splitlines()[-2:]] == ["LABEL_1", "LABEL_0"]


@pytest.mark.long
def test_the_grpc_client_asks_a_real_server(exported):
    script = Path(triton_stub.__file__).with_name("triton_grpc.py")
    done = subprocess.run(
        [sys.executable, script, exported, "a good film", "awful plot"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["LABEL_1", "LABEL_0"]


def test_files_that_come_into_the_folder_meanwhile_stay(finished_run, tmp_path, monkeypatch):
    out, write = tmp_path / "out", export._write_deployment

    def write_meanwhile(made, context):
        write(made, context)
        lock = FileLock(finished_run / LOCK)
        with pytest.raises(Timeout):  # nobody changes the run meanwhile
            lock.acquire(timeout=0)
        out.mkdir()
        (out / "mine.txt").write_text("mine")

    monkeypatch.setattr(export, "_write_deployment", write_meanwhile)
    with pytest.raises(UserError, match="got files of somebody else meanwhile; give an empty or new folder"):
        export_triton(finished_run, out, "sst2")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_what_cannot_be_exported_is_told(finished_run, tmp_path, qdqbench):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    refused(
        qdqbench("export-triton", finished_run, "--out", tmp_path / "full"),
        "holds files; give an empty or new folder",
    )
    done = qdqbench("export-triton", tmp_path, "--out", tmp_path / "out")
    assert "no run directory" in done.err
    with pytest.raises(UserError, match="other signs than letters"):
        export_triton(finished_run, tmp_path / "out", "../../x")
    assert not (tmp_path / "out").exists()
