"""Fine-tuning and QAT on a GPU: bf16, no waiting for the device in a step, and two GPUs as one."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

from qdqbench.eval.runs.results import Results
from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.models.load import load_encoder
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION
from qdqbench.quantize.training import loop

from ..integration.cases import edited
from ..support.families import write_model
from ..support.tiny_bert import padded_batch
from .conftest import invoke

QUICK = ("--epochs", 2, "--num-evals", 2, "--batch-size", 16)


def recipe(folder, **qat):
    change = {"name": "trained", "gate": {"max_drop": 0.2}}
    change |= {"qat": {"epochs": 2, "batch_size": 16, "num_evals": 2} | qat}
    return edited(folder / "trained.yaml", change, "bert-int8-attention-qat")


def test_finetune_in_bf16(sst2, tmp_path):
    options = (*QUICK, "--learning-rate", 1e-3, "--out", tmp_path / "f", "--json")
    outcome = invoke("finetune", *sst2.options, *options)
    assert outcome.exit_code == 0, outcome.exception
    run = json.loads(outcome.stdout)["runs"][0]
    assert (run["precision"], run["status"]) == ("bf16", "done")
    assert run["device"] == torch.cuda.get_device_name()
    assert run["metrics"]["accuracy"] > 0.6


@pytest.mark.parametrize("amax", ["frozen", "learned"])
def test_qat_down_to_a_verified_engine(sst2, tmp_path, amax):
    out = tmp_path / "run"
    outcome = invoke("qat", recipe(tmp_path, amax=amax), *sst2.options, "--out", out)
    assert outcome.exit_code == 0, outcome.exception
    results = Results.model_validate_json((out / "results.json").read_text())
    assert results.stages["engine"].status == "done"
    assert results.verification is not None
    assert results.verification.passed
    assert results.training is not None
    assert results.training.precision == "tf32"


def test_a_step_of_the_quantized_model_does_not_wait_for_the_device(finished_run):
    folder = finished_run("bert-int8-attention")
    model = Session(read_config(folder), folder).new_ptq_model().cuda().train()
    native.use_native(model)
    native.learn_amax(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = {
        "input_ids": torch.randint(5, 20, (4, 16), device="cuda"),
        "attention_mask": torch.ones(4, 16, dtype=torch.long, device="cuda"),
        "token_type_ids": torch.zeros(4, 16, dtype=torch.long, device="cuda"),
    }

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).logits.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        native.keep_positive(model)

    step()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode itself warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_gradients_are_finite_where_padding_fills_a_window(model_type, tmp_path):
    folder = str(write_model(tmp_path, model_type))
    model = load_encoder(folder, CLASSIFICATION, num_labels=2, keep_head=True).cuda()
    for longest in (63, 64, 65, 96):
        batch = padded_batch((longest, 20))
        inputs = {name: torch.from_numpy(array).cuda() for name, array in select_inputs(model, batch).items()}
        with loop.use_matmul_precision("bf16"), torch.autocast("cuda", torch.bfloat16):
            torch.nn.functional.cross_entropy(model(**inputs).logits, torch.tensor([0, 1]).cuda()).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_one_model(sst2, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "qdqbench", "qat", str(recipe(tmp_path)), *sst2.options]
    command += ["--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = Results.model_validate_json((tmp_path / "run" / "results.json").read_text())
    assert results.training is not None
    assert results.training.processes == 2
