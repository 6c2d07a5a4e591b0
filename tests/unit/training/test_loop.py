"""The training loop: what changes nothing, what stops it, and what a killed run goes on from."""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.recipe.sections import Qat, Training
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.training import finetune, loop
from qdqbench.quantize.utils.errors import CheckFailed, UserError

from ...support import tiny_training as tiny
from ...support.families import SIZES, new_model

HERE = Path(__file__).parents[2] / "support"


class Killed(BaseException):
    """Stands for a signal."""


def train(job):
    return loop.train(job, loop.new_accelerator("fp32"))


def trained(*folder, **settings):
    """A job that was trained."""
    job = tiny.job(*folder, **settings)
    train(job)
    return job


def killed_after(job, evaluations):
    """Run a job until an evaluation past the given number begins."""
    judge, left = job.judge, [None] * evaluations

    def counted(model):
        if not left:
            raise Killed
        left.pop()
        return judge(model)

    job.judge = counted
    with pytest.raises(Killed):
        train(job)


def list_checkpoints(folder):
    return sorted(folder.glob("step-*"))


def told(job, text):
    return any(text in note for note in job.notes)


def test_it_learns_and_keeps_the_best_weights(tmp_path):
    job = trained(tmp_path)
    outcome = job.run
    judged = {row.step: row.score for row in outcome.log if row.score is not None}
    assert outcome.steps == loop.total_steps(job.data, job.settings) == 18
    assert set(judged) == loop.evaluation_steps(18, 4)
    best = judged[outcome.best_step]
    assert best == max(judged.values()) > -0.4  # ln 2 is what a constant answer gets
    assert job.judge(job.model).score == pytest.approx(best, abs=1e-6)
    assert outcome.samples_per_s * outcome.seconds == pytest.approx(3 * len(job.data.rows))


def scored(job, *scores, **changes):
    """The job with the scores of its next evaluations given."""
    judge, left = job.judge, list(scores)
    job.judge = lambda model: dataclasses.replace(judge(model), score=left.pop(0))
    return dataclasses.replace(job, **changes)


def test_the_weights_before_training_can_be_the_best(tmp_path):
    settings = {"learning_rate": 0.9, "max_grad_norm": 1e9, "epochs": 1}
    job = scored(tiny.job(tmp_path, **settings), -1, -2, -3, -4, -5, judge_first=True)
    before = tiny.weights(job).clone()
    assert train(job).best_step == 0
    assert torch.equal(tiny.weights(job), before)


@pytest.mark.parametrize(
    ("evaluations", "damaged"),
    [(1, None), (3, None), (3, "optimizer.bin"), (3, loop.CHECKPOINT_FILE)],
)
def test_a_killed_run_goes_on_bit_for_bit_from_its_last_whole_checkpoint(tmp_path, evaluations, damaged):
    whole = trained(tmp_path / "whole", dropout=0.3)
    killed_after(tiny.job(tmp_path / "killed", dropout=0.3), evaluations)
    last = list_checkpoints(tmp_path / "killed")[-1]
    if damaged:
        (last / damaged).write_bytes((last / damaged).read_bytes()[:-10])
    torch.manual_seed(99)  # the state of the new process is another one
    resumed = trained(tmp_path / "killed", dropout=0.3)
    assert told(resumed, "resumed after step")
    assert told(resumed, f"{last.name} is damaged ({damaged})") == bool(damaged)
    assert resumed.run.steps == 18
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))


def test_a_resumed_run_says_that_threads_were_others(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    for now in (threads, threads + 1):
        killed_after(tiny.job(tmp_path), 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda now=now: now)
        said = f"{threads} threads before, {now} now: sums are rounded differently"
        assert (said in trained(tmp_path).notes) == (now != threads)
        shutil.rmtree(tmp_path)


def test_the_checkpoint_before_a_damaged_one_has_its_best_too(tmp_path):
    whole = scored(tiny.job(tmp_path / "whole"), -0.5, -1.0, -0.1, -2.0)
    best = train(whole).best_step
    killed_after(scored(tiny.job(tmp_path / "killed"), -0.5, -1.0, -0.1), 3)
    found = list_checkpoints(tmp_path / "killed")
    assert len(found) == 3  # the last, which is the best, the one before, and the best of that time
    (found[-1] / loop.WEIGHTS).unlink()
    resumed = scored(tiny.job(tmp_path / "killed"), -0.1, -2.0)
    assert train(resumed).best_step == best
    assert told(resumed, f"{found[-1].name} is damaged (model.safetensors)")
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))


@pytest.mark.parametrize("lost", [loop.CHECKPOINT_FILE, loop.WEIGHTS])
def test_a_checkpoint_without_its_best_is_passed_over(tmp_path, lost):
    killed_after(scored(tiny.job(tmp_path), -0.5, -1.0), 2)
    best, last = list_checkpoints(tmp_path)
    (best / lost).unlink()
    resumed = trained(tmp_path)
    assert resumed.run.steps == 18
    assert told(resumed, f"{last.name} is damaged ({best.name}/{lost})")
    assert resumed.notes[-1] == "no whole checkpoint was left; the training began again"


def test_a_training_that_begins_again_removes_what_was_passed_over(tmp_path):
    killed_after(tiny.job(tmp_path), 3)
    for path in list_checkpoints(tmp_path):
        (path / loop.CHECKPOINT_FILE).write_text("{")
    killed_after(tiny.job(tmp_path), 1)
    assert list_checkpoints(tmp_path) == [loop.get_checkpoint_folder(tmp_path, 4)]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    killed_after(tiny.job(tmp_path, precision="fp32"), 2)
    path = list_checkpoints(tmp_path)[-1] / loop.CHECKPOINT_FILE
    other = {"learning_rate": 0.01, "model": "another", "arithmetic": "bf16", "device": "npu", "processes": 2}
    stored = json.loads(path.read_text())
    here = {key: stored["identity"][key] for key in other}
    for key, there in other.items():
        path.write_text(json.dumps(stored | {"identity": stored["identity"] | {key: there}}))
        said = rf"checkpoint of another run: it differs in {key} \(there {there}, here {here[key]}\)"
        with pytest.raises(UserError, match=said):
            trained(tmp_path, precision="fp32")


def test_accumulation_changes_rounding_only(tmp_path):
    one, three = (trained(tmp_path / str(parts), gradient_accumulation_steps=parts) for parts in (1, 3))
    assert torch.allclose(tiny.weights(one), tiny.weights(three), atol=2e-5)


@pytest.mark.parametrize(
    ("value", "slope", "what"),
    [(float("nan"), 1.0, "the training loss"), (0.0, float("inf"), "the gradient of the training loss")],
)
def test_nan_stops_the_run_and_says_where(value, slope, what, tmp_path):
    job = tiny.job(tmp_path)
    plain, calls = job.loss, itertools.count(1)

    def breaks(model, rows, batch):
        loss = plain(model, rows, batch)
        if next(calls) == 7:
            loss.register_hook(lambda gradient: gradient * slope)
            loss = loss + value
        return loss

    job.loss = breaks
    with pytest.raises(CheckFailed, match=f"^{what} became NaN or infinite at step 7; lower"):
        train(job)


def test_attention_is_not_trained_by_cudnn(tmp_path):
    seen, job = [], tiny.job(tmp_path)
    job.after_step = lambda: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    train(job)
    assert torch.backends.cuda.cudnn_sdp_enabled()  # PyTorch's default, again
    assert not any(seen)
    assert len(seen) == 18


@pytest.mark.parametrize("judge_first", [True, False])  # at step 0, and half of the steps with a new head
def test_a_model_may_answer_the_same_at_first_and_else_stops_the_run(tmp_path, judge_first):
    job = tiny.job(tmp_path / "first", collapsed=lambda number: number < 2)
    job.judge_first = judge_first
    train(job)
    job = tiny.job(tmp_path / "later", collapsed=lambda number: number >= 1)
    job.judge_first = judge_first
    stops = 9 if judge_first else 18
    with pytest.raises(CheckFailed, match=rf"diverged: after step {stops} .* learning_rate \(now 0.05\)"):
        train(job)


def far(folder, *scores):
    return scored(tiny.job(folder), *scores, judge_first=True, far=10.0)


def test_a_model_far_from_its_teacher_stops_the_run_and_a_resumed_one(tmp_path):
    with pytest.raises(CheckFailed, match=r"held-out rows fell from 17.0 to 4.0 dB after step 9; lower"):
        train(far(tmp_path / "whole", 17, 5.2, 4))
    killed_after(far(tmp_path, 17, 5.2), 2)
    with pytest.raises(CheckFailed, match=r"fell from 17.0 to 4.0"):
        train(far(tmp_path, 4))


@pytest.mark.parametrize(
    "scores",
    [
        (50, 10.5, 10.5, 10.5, 10.5),  # far from where it began, which is still near
        (13, 4, 4, 4, 4),  # 9 dB further
        (17, 5.2, 10.1, 5.2, 10.1),  # and back
    ],
)
def test_a_model_that_is_not_far_goes_on(tmp_path, scores):
    outcome = train(far(tmp_path, *scores))
    assert (outcome.steps, outcome.best_step) == (18, 0)


def automatic(folder, gains=None):
    """A job that finds its learning rate; `gains` in dB are what its short trainings are judged by."""
    job, seen = tiny.job(folder, weight_decay=0.0), []
    job.settings = Qat(**job.settings.model_dump() | {"learning_rate": "auto"})
    job.judge_first, judge, scores = True, job.judge, [0, *(gains or ())]

    def in_db(model):
        seen.append(tiny.weights(job).clone())
        given = gains and len(seen) <= len(scores)
        score = 30.0 + (scores[len(seen) - 1] if given else 1000 * judge(model).score)
        return loop.HeldOut(score, {"sqnr_db": score}, False)

    job.judge = in_db
    return job, seen


@pytest.mark.parametrize(
    ("gains", "tried", "chosen"),
    [
        ((0.05, 0.5, 2.0, 1.0, 1.9), 5, 3e-6),
        ((0.3, 0.25, 0.2), 3, 3e-7),
        ((-0.6, 0.3, -5.0, 0.2), 4, 1e-6),
        ((-0.2, -0.1), 2, 0.0),
        ((0.02, 0.05, -1.0, -2.0), 4, 0.0),  # not worth a training
        ((float("nan"),), 0, 0.0),
        ((0.3, 0.5, float("nan")), 2, 1e-6),
    ],
)
def test_the_rate_that_wins_most_is_found(tmp_path, gains, tried, chosen):
    job, seen = automatic(tmp_path, gains)
    run = train(job)
    assert (len(run.tried), run.learning_rate) == (tried, chosen)
    assert [each.learning_rate for each in run.tried] == list(loop.RATES[:tried])
    assert (run.stopped, run.steps) == ((None, 18) if chosen else ("nothing to win", 0))
    assert chosen or run.best_step == 0
    assert chosen or torch.equal(tiny.weights(job), seen[0])  # those before training
    assert any("became NaN" in note for note in job.notes) == bool(np.isnan(gains).any())


def test_a_found_rate_trains_as_a_given_one_and_a_resumed_run_keeps_it(tmp_path):
    found, _ = automatic(tmp_path / "found")
    run = train(found)
    assert run.learning_rate == loop.RATES[-1]
    same = trained(tmp_path / "given", weight_decay=0.0, learning_rate=run.learning_rate)
    assert torch.equal(tiny.weights(found), tiny.weights(same))
    killed_after(automatic(tmp_path / "killed")[0], 3 + len(run.tried))
    job, seen = automatic(tmp_path / "killed")
    assert (train(job).tried, len(seen)) == (run.tried, 2)
    assert torch.equal(tiny.weights(job), tiny.weights(found))


def test_answers_that_do_not_depend_on_the_input():
    classes, scores = get_task("sst2").kind, get_task("stsb").kind
    labels, draw = np.array([1, 1, 1, 1, 0]), np.random.default_rng(0)
    one_class = np.array([[0.0, 3.0]], np.float32) + draw.normal(0, 0.1, (5, 2)).astype(np.float32)
    assert not classes.constant(one_class, labels)
    same = np.tile(one_class[:1], (5, 1))
    assert classes.constant(same, labels)
    moved = same + np.arange(5, dtype=np.float32)[:, None]  # equal probabilities
    assert classes.constant(moved, labels)
    assert not classes.constant(same, np.ones(5, np.int64))
    assert scores.constant(same[:, :1], np.arange(5.0))
    assert not scores.constant(one_class[:, :1], np.arange(5.0))


def test_patience_or_missing_room_ends_the_run(tmp_path):
    outcome = train(scored(tiny.job(tmp_path, num_evals=6, patience=2), -1, -2, -3))
    assert (outcome.steps, outcome.best_step, outcome.stopped) == (9, 3, "no gain in 2 evaluations")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="checkpoints cannot be written"):
        trained(tmp_path / "file")


def test_two_processes_do_what_one_does(tmp_path):
    one = trained(tmp_path / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, str(HERE / "two_processes.py"), str(tmp_path / "two")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / "two" / f"weights-{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert torch.equal(*found)
    assert torch.allclose(found[0], tiny.weights(one), atol=2e-5)


@given(rows=st.integers(1, 200), world=st.integers(1, 5), accumulate=st.integers(1, 4))
def test_shares_are_the_batch(rows, world, accumulate):
    batch = np.arange(rows) * 3
    parts = [loop.split_batch(batch, rank, world, accumulate) for rank in range(world)]
    assert all(part and all(len(rows) for rows in part) for part in parts)
    assert all(len(part) <= accumulate for part in parts)
    together = np.concatenate([rows for part in parts for rows in part])
    assert set(together) == set(batch)
    assert len(together) == max(rows, world)


@given(seed=st.integers(0, 2**31), epoch=st.integers(0, 50), size=st.integers(1, 100))
def test_every_epoch_sees_every_row_once(seed, epoch, size):
    data = loop.divide(tiny.sentences(), 0, 0.2, seed)
    batches = loop.epoch_batches(data, size, seed, epoch)
    assert sorted(np.concatenate(batches)) == sorted(data.rows)
    assert all(len(batch) <= size for batch in batches)
    again, other = (loop.epoch_batches(data, size, seed, number) for number in (epoch, epoch + 1))
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    assert not np.array_equal(np.concatenate(batches), np.concatenate(other))
    assert not set(data.rows) & set(data.held_out)
    assert len(data.rows) + len(data.held_out) == tiny.ROWS


def test_emulated_bf16_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert loop.resolve_precision("auto") == "fp32"


@pytest.mark.parametrize(
    ("error", "launched", "ended"),
    [
        (None, 2, ["left"]),
        (UserError("x"), 2, ["left"]),
        (RuntimeError("alone"), 2, ["exit 1"]),
        (RuntimeError("alone"), 1, ["left"]),
    ],
)
def test_a_process_that_fails_alone_waits_for_none(monkeypatch, capsys, error, launched, ended):
    seen = []

    def leave_at_once(code):
        seen.append(f"exit {code}")
        raise SystemExit

    monkeypatch.setenv("WORLD_SIZE", str(launched))
    monkeypatch.setattr(loop, "leave_group", lambda: seen.append("left"))
    monkeypatch.setattr(loop.os, "_exit", leave_at_once)
    with pytest.raises((UserError, RuntimeError, SystemExit)) if error else nullcontext(), loop.join_group():
        if error:
            raise error
    assert seen[:1] == ended  # a real `_exit` does not return
    said = "process 0 failed and stops the training, RuntimeError: alone\n"
    assert capsys.readouterr().err.endswith(said) == (ended == ["exit 1"])


def validated(task, answers, monkeypatch, **gold):
    """What is said of answers to evaluation splits."""
    monkeypatch.setattr(loop, "predict_rows", lambda _, __, ___, split, ____: answers[: len(split.gold)])
    splits = {name: SimpleNamespace(gold=labels) for name, labels in gold.items()}
    seeds = SimpleNamespace(task=task, evaluation=splits, pad_id=0, accelerator=None)
    return finetune._Seeds.validate(seeds, None)


def test_mnli_counts_the_samples_of_its_first_split(monkeypatch):
    labels = np.arange(90) % 3
    answers = np.eye(3, dtype=np.float32)[labels]
    found, _ = validated(get_task("mnli"), answers, monkeypatch, matched=labels[:60], mm=labels)
    assert found["n"] == 60
    assert set(found["metrics"]) == {"accuracy", "accuracy_mm"}


def test_steps_and_rows_to_hold_out():
    data = loop.divide(tiny.sentences(), 0, 0.2, 0)
    for most, steps in ((None, 15), (4, 4), (100, 15)):  # max_steps end the epochs early
        assert loop.total_steps(data, Training(epochs=3, batch_size=16, max_steps=most)) == steps
    with pytest.raises(UserError, match="90 samples, of which 1 would be held out"):
        loop.divide(tiny.sentences(), 0, 0.01, 0)


@given(steps=st.integers(1, 500), evaluations=st.integers(1, 600))
def test_the_last_step_is_always_judged(steps, evaluations):
    due = loop.evaluation_steps(steps, evaluations)
    assert max(due) == steps
    assert min(due) >= 1
    assert len(due) == min(steps, evaluations)


def test_a_checkpoint_that_a_full_disk_stops_leaves_nothing(tmp_path, monkeypatch):
    def full(folder):
        (Path(folder) / "half").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Accelerator, "save_state", lambda _, folder: full(folder))
    with pytest.raises(UserError, match=r"checkpoints cannot be written into .*No space left"):
        trained(tmp_path)
    assert not [*tmp_path.glob(".step-*")]


@pytest.mark.parametrize(("task", "constant"), [("stsb", "0.0000"), ("sst2", "0.5")])
@pytest.mark.parametrize("learned", [True, False])
def test_a_model_no_better_than_a_constant_answer_is_told(task, constant, learned, monkeypatch):
    random, task = np.random.default_rng(0), get_task(task)
    gold = random.integers(0, 2, 200)
    answers = random.normal(size=(200, task.num_labels)).astype(np.float32)
    answers[:, -1] += 9 * (gold - 0.5) * learned
    found, doubts = validated(task, answers, monkeypatch, validation=gold)
    assert found["n"] == 200
    assert (found["metrics"][task.metrics[0]] > 0.8) == learned
    assert len(doubts) == (not learned)
    if doubts:
        assert constant in doubts[0]


@pytest.mark.parametrize("model_type", sorted(SIZES))
def test_a_new_head_of_regression_starts_at_the_mean_label(model_type):
    model = new_model(model_type, labels=1)
    ids, answers = torch.tensor([[2, 5, 6, 3]]), []
    for mean in (0.0, 2.75):
        finetune.center_head(model, mean)
        answers.append(model(input_ids=ids).logits.item())
    assert answers[1] - answers[0] == pytest.approx(2.75, abs=1e-5)


@pytest.mark.parametrize(
    ("task", "keep_head", "centered"), [("stsb", False, 1), ("stsb", True, 0), ("sst2", False, 0)]
)
def test_only_a_new_head_of_regression_is_centered(task, keep_head, centered, monkeypatch):
    means = []
    monkeypatch.setattr(finetune, "center_head", lambda model, mean: means.append(mean))
    monkeypatch.setattr(loop, "divide", lambda *_: SimpleNamespace(judged=None))
    monkeypatch.setattr(loop, "group_decayed", lambda *_: [])
    seeds = SimpleNamespace(
        request=SimpleNamespace(keep_head=keep_head, folder=Path()),
        accelerator=SimpleNamespace(device="cpu"),
        task=get_task(task),
        train_rows=SimpleNamespace(labels=np.array([0, 1, 1, 4])),
        pad_id=0,
        load_base=lambda _: None,
    )
    finetune._Seeds.new_job(seeds, Training(), {})
    assert means == [1.5] * centered
