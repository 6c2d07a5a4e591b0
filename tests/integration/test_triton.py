"""A run as a model repository of Triton: its model under a stub of Triton's API, and in a real Triton."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

from qdqbench.quantize.deployment import triton
from qdqbench.quantize.deployment.triton import export_triton
from qdqbench.quantize.utils.errors import UserError

from ..support.triton_stub import Loaded, column
from .tiny import refused

# an environment of its own: Triton's Python backend there needs NumPy 1
SCRIPT = Path(__file__).parents[1] / "support" / "real_triton.py"
PYTHON = os.environ.get("TRITON_PYTHON") or (sys.executable if find_spec("pytriton") else "")


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("triton") / "out"
    export_triton(finished_run / "deploy", out, "sst2")
    return out


@pytest.fixture(scope="module")
def model(exported):
    return Loaded(exported / "models" / "sst2")


def test_a_text_that_cannot_be_read_has_an_error_of_its_own(model):
    bad, long = np.array([[b"\xff\xfe"]], dtype=np.object_), column(["a" * 300_000])
    answers = model.ask({"TEXT": bad}, {"TEXT": column(["a"])}, {"TEXT": long})
    assert [answer.error() is not None for answer in answers] == [True, False, True]
    assert "cannot be answered" in str(answers[0].error())


@pytest.mark.skipif(not PYTHON, reason="needs nvidia-pytriton: TRITON_PYTHON names a Python that has it")
def test_clients_get_the_answers_of_a_real_triton(exported, finished_run):
    texts = ["a good film", "awful plot"]
    command = [PYTHON, SCRIPT, exported, *texts]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    script = finished_run / "deploy" / "run_onnxruntime.py"
    known = subprocess.run([sys.executable, script, *texts], capture_output=True, text=True, check=True)
    labels = [json.loads(line)["label"] for line in known.stdout.splitlines()]
    for protocol in ("http", "grpc"):
        lines = done.stdout.partition(f"{protocol} ")[2].splitlines()[:2]
        assert [json.loads(line)["label"] for line in lines] == labels


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
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (rule,) = documents["prometheus-adapter.yaml", ""]["rules"]["custom"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    assert "nv_inference_queue_duration_us" in rule["metricsQuery"]
    assert rule["metricsQuery"].count("(") == rule["metricsQuery"].count(")")
    compose = documents["compose.yaml", ""]["services"]
    assert all(port.startswith("127.0.0.1:") for each in compose.values() for port in each["ports"])
    assert compose["triton"]["healthcheck"]
    assert "triton" in documents["compose.gpu.yaml", ""]["services"]
    (gpu,) = documents["gpu-patch.yaml", ""]["spec"]["template"]["spec"]["containers"]
    assert gpu["resources"]["limits"] == {"nvidia.com/gpu": "1"}
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
    for protocol in ("http", "grpc"):
        assert ast.get_docstring(ast.parse((exported / f"client_{protocol}.py").read_text()))


def test_files_that_come_into_the_folder_meanwhile_stay(finished_run, tmp_path, monkeypatch):
    out, write = tmp_path / "out", triton._render

    def write_meanwhile(template, context):
        if template == "config.pbtxt":
            out.mkdir()
            (out / "mine.txt").write_text("mine")
        return write(template, context)

    monkeypatch.setattr(triton, "_render", write_meanwhile)
    with pytest.raises(UserError, match="got files of somebody else meanwhile; give an empty or new folder"):
        export_triton(finished_run / "deploy", out, "sst2")
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
        export_triton(finished_run / "deploy", tmp_path / "out", "../../x")
    assert not (tmp_path / "out").exists()
