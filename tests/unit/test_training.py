"""The training loop: what changes nothing, what stops it, and what a killed run goes on from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize import checkpoints
from qdqbench.quantize.errors import CheckFailed, UserError
from qdqbench.quantize.processes import new_accelerator
from qdqbench.quantize.training import evaluation_steps, total_steps, train
from qdqbench.quantize.training_data import divide, epoch_batches, shares
from qdqbench.quantize.training_settings import Distill, Training

from . import tiny_training as tiny

HERE = Path(__file__).parent


class Killed(BaseException):
    """Stands for a signal."""


@pytest.fixture
def accelerator():
    return new_accelerator("fp32")


def killed_after(job, evaluations, accelerator):
    """Run a job until an evaluation past the given number begins."""
    judge, seen = job.judge, []

    def counted(model):
        if len(seen) == evaluations:
            raise Killed
        seen.append(None)
        return judge(model)

    job.judge = counted
    with pytest.raises(Killed):
        train(job, accelerator)


def test_it_learns_and_keeps_the_best_weights(tmp_path, accelerator):
    job = tiny.job(tmp_path)
    outcome = train(job, accelerator)
    judged = {row.step: row.score for row in outcome.log if row.score is not None}
    assert outcome.steps == total_steps(job.data, job.settings) == 18
    assert set(judged) == evaluation_steps(18, 4)
    assert outcome.best_score == max(judged.values()) > -0.4  # ln 2 is what a constant answer gets
    assert judged[outcome.best_step] == outcome.best_score
    assert job.judge(job.model).score == pytest.approx(outcome.best_score, abs=1e-6)
    assert outcome.samples == 3 * len(job.data.rows)


def test_the_weights_before_training_can_be_the_best(tmp_path, accelerator):
    job = tiny.job(tmp_path, learning_rate=0.9, max_grad_norm=1e9, epochs=1)
    job.judge_first = True
    before = tiny.weights(job).clone()
    judge, first = job.judge, []

    def worse_each_time(model):
        first.append(None)
        return judge(model).__class__(-len(first), {}, False)

    job.judge = worse_each_time
    assert train(job, accelerator).best_step == 0
    assert torch.equal(tiny.weights(job), before)


@pytest.mark.parametrize("evaluations", [1, 3])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, accelerator, evaluations):
    whole = tiny.job(tmp_path / "whole", dropout=0.3)
    train(whole, accelerator)
    killed_after(tiny.job(tmp_path / "killed", dropout=0.3), evaluations, accelerator)
    torch.manual_seed(99)  # the state of the new process is another one
    resumed = tiny.job(tmp_path / "killed", dropout=0.3)
    outcome = train(resumed, accelerator)
    assert any("resumed after step" in note for note in resumed.notes)
    assert outcome.steps == 18
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))


def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(tmp_path, accelerator):
    whole = tiny.job(tmp_path / "whole", dropout=0.3)
    train(whole, accelerator)
    killed_after(tiny.job(tmp_path / "killed", dropout=0.3), 3, accelerator)
    last = sorted((tmp_path / "killed").glob("step-*"))[-1]
    optimizer = last / "optimizer.bin"
    optimizer.write_bytes(optimizer.read_bytes()[:-10])
    resumed = tiny.job(tmp_path / "killed", dropout=0.3)
    train(resumed, accelerator)
    assert any(f"{last.name} is damaged (optimizer.bin)" in note for note in resumed.notes)
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))


def test_a_checkpoint_without_its_manifest_is_passed_over(tmp_path, accelerator):
    killed_after(tiny.job(tmp_path), 2, accelerator)
    last = sorted(tmp_path.glob("step-*"))[-1]
    (last / checkpoints.MANIFEST).write_text("{")
    resumed = tiny.job(tmp_path)
    train(resumed, accelerator)
    assert any(last.name in note for note in resumed.notes)


@pytest.mark.parametrize(("key", "value"), [("model", "another"), ("learning_rate", 0.01)])
def test_a_checkpoint_of_another_run_is_refused(tmp_path, accelerator, key, value):
    killed_after(tiny.job(tmp_path), 2, accelerator)
    other = tiny.job(tmp_path)
    other.identity[key] = value
    with pytest.raises(UserError, match=f"checkpoint of another run: it differs in {key} "):
        train(other, accelerator)


def test_a_checkpoint_of_another_number_of_processes_is_refused(tmp_path, accelerator):
    killed_after(tiny.job(tmp_path), 2, accelerator)
    for path in tmp_path.glob(f"step-*/{checkpoints.MANIFEST}"):
        stored = json.loads(path.read_text())
        stored["identity"]["processes"] = 2
        path.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"processes \(there 2, here 1\)"):
        train(tiny.job(tmp_path), accelerator)


def test_accumulation_changes_rounding_only(tmp_path, accelerator):
    results = []
    for parts in (1, 3):
        job = tiny.job(tmp_path / str(parts), accumulate=parts)
        train(job, accelerator)
        results.append(tiny.weights(job))
    assert torch.allclose(*results, atol=2e-5)


def test_nan_stops_the_run_and_says_where(tmp_path, accelerator):
    job = tiny.job(tmp_path)
    plain, calls = job.loss, []

    def breaks(model, rows, batch):
        calls.append(None)
        return plain(model, rows, batch) * (float("nan") if len(calls) == 7 else 1.0)

    job.loss = breaks
    with pytest.raises(CheckFailed, match="gradient became NaN or infinite between steps 5 and 9; lower"):
        train(job, accelerator)


def test_a_model_that_answers_the_same_stops_the_run(tmp_path, accelerator):
    job = tiny.job(tmp_path, collapsed=lambda number: number >= 1)
    job.judge_first = True
    with pytest.raises(CheckFailed, match=r"diverged: after step 9 .* lower learning_rate \(now 0.05\)"):
        train(job, accelerator)


def test_a_new_head_may_answer_the_same_for_half_of_the_steps(tmp_path, accelerator):
    train(tiny.job(tmp_path, collapsed=lambda number: number < 2), accelerator)


def test_patience_ends_the_run(tmp_path, accelerator):
    job = tiny.job(tmp_path, evaluations=6, patience=2)
    judge, seen = job.judge, []

    def falling(model):
        seen.append(None)
        return judge(model).__class__(-len(seen), {}, False)

    job.judge = falling
    outcome = train(job, accelerator)
    assert (outcome.steps, outcome.best_step, outcome.stopped) == (9, 3, "no gain in 2 evaluations")


def test_checkpoints_that_cannot_be_written(tmp_path, accelerator):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="checkpoints cannot be written"):
        train(tiny.job(tmp_path / "file"), accelerator)


def test_two_processes_do_what_one_does(tmp_path, accelerator):
    one = tiny.job(tmp_path / "one")
    train(one, accelerator)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [*command, str(HERE / "two_processes.py"), str(tmp_path / "two")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / "two" / f"weights-{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert torch.equal(*found)
    assert torch.allclose(found[0], tiny.weights(one), atol=2e-5)


@given(
    rows=st.integers(1, 200),
    world=st.integers(1, 5),
    accumulate=st.integers(1, 4),
)
def test_shares_are_the_batch(rows, world, accumulate):
    batch = np.arange(rows) * 3
    parts = [shares(batch, rank, world, accumulate) for rank in range(world)]
    assert all(part and all(len(rows) for rows in part) for part in parts)
    assert all(len(part) <= accumulate for part in parts)
    together = np.concatenate([rows for part in parts for rows in part])
    assert set(together) == set(batch)
    assert len(together) == max(rows, world)


@given(seed=st.integers(0, 2**31), epoch=st.integers(0, 50), size=st.integers(1, 100))
def test_every_epoch_sees_every_row_once(seed, epoch, size):
    data = divide(tiny.sentences(), 0, 0.2, seed)
    batches = epoch_batches(data, size, seed, epoch)
    assert sorted(np.concatenate(batches)) == sorted(data.rows)
    assert all(len(batch) <= size for batch in batches)
    again = epoch_batches(data, size, seed, epoch)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    assert not set(data.rows) & set(data.held_out)
    assert len(data.rows) + len(data.held_out) == tiny.ROWS


def test_epochs_differ():
    data = divide(tiny.sentences(), 0, 0.2, 0)
    first, second = (np.concatenate(epoch_batches(data, 16, 0, epoch)) for epoch in (0, 1))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(("most", "steps"), [(None, 15), (4, 4), (100, 15)])
def test_max_steps_end_the_epochs_early(most, steps):
    data = divide(tiny.sentences(), 0, 0.2, 0)
    assert total_steps(data, Training(epochs=3, batch_size=16, max_steps=most)) == steps


def test_too_few_rows_to_hold_out():
    with pytest.raises(UserError, match="90 rows, of which 1 would be held out"):
        divide(tiny.sentences(), 0, 0.01, 0)


@given(steps=st.integers(1, 500), evaluations=st.integers(1, 600))
def test_the_last_step_is_always_judged(steps, evaluations):
    due = evaluation_steps(steps, evaluations)
    assert max(due) == steps
    assert min(due) >= 1
    assert len(due) == min(steps, evaluations)


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"learning_rate": 0}, {"holdout": 0}, {"schedule": "step"}, {"epoch": 3}]
)
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Training(**wrong)


def test_a_distillation_without_parts():
    with pytest.raises(ValueError, match="nothing to learn from"):
        Distill(logits=0)
