"""What a step will take, from what a few batches, and then the first run, took here."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.eval.accuracy.runners import evaluating, predict, torch_runner
from qdqbench.eval.report.formats import label
from qdqbench.quantize.core.results import Results
from qdqbench.quantize.machine.gpu import find_gpu
from qdqbench.quantize.rundir.session import Session

if TYPE_CHECKING:
    from qdqbench.quantize.recipe.training import Qat

PROBED = 64  # samples
# of an evaluation in FP32, until a run says what they are here; somewhat above docs/measured-cpu, and so not
# checked on a GPU (`UNCHECKED`): in docs/measured* a calibration took 0.3 to 28 times as long as FP32 there
FAKE_QUANT, CALIBRATION = 1.5, 6.0
RUN_EVALUATIONS = 1 + FAKE_QUANT + 2.0 + 0.5  # FP32, fake-quant, ONNX Runtime, engine
RUN_S = 15.0  # what else a run does
TRAINING = 5.0  # forward with fake-quant, backward, and the teacher
LATENCY_S = 8.0


UNCHECKED = (
    "the estimates take calibrations and fake-quant as multiples of FP32 that were measured on CPUs and "
    "never checked on a GPU"
)
LATENCY_ON = ("openvino", "onnxruntime", "tensorrt_rtx")  # backends on which `LATENCY_S` was measured


def unchecked(backend: str | None) -> str:
    """What of the estimates was never checked where they are made; empty where all was.

    Args:
        backend: whose engines are timed; None: none are.
    """
    found = [UNCHECKED] if find_gpu() else []
    if backend is not None and backend not in LATENCY_ON:
        found.append(f"that an engine takes about {LATENCY_S:g} s was never checked with {label(backend)}")
    return ", and ".join(found)


@dataclass(frozen=True)
class Pace:
    """Seconds that things take here."""

    fp32_s: float  # one row in FP32
    fake_s: float  # one row in fake-quant
    calibration_s: float  # all that calibration does with one sample
    run_s: float  # a whole run with its latency, FP32's evaluation aside

    def calibrated(self, passes: float, samples: int) -> float:
        """Seconds of some calibrations."""
        return passes * samples * self.calibration_s

    def training(self, settings: "Qat", rows: int) -> tuple[float, float, int]:
        """Seconds before and beside the steps of a training, of one step, and its steps.

        Args:
            rows: of the train split.
        """
        held = min(round(rows * settings.holdout), 1000)
        per_epoch = -(-max(rows - held, 1) // settings.batch_size)
        steps = max(1, round(settings.epochs * per_epoch))
        steps = min(steps, settings.max_steps or steps)
        around = rows * self.fp32_s + (1 + settings.evaluations) * held * (self.fp32_s + self.fake_s)
        return around, settings.batch_size * TRAINING * self.fp32_s, steps


def probed(session: Session) -> Pace:
    """From a few batches in FP32.

    Raises:
        UserError: model or data cannot be used.
    """
    encoded = next(iter(session.eval_splits.values()))[1]
    count = min(PROBED, len(encoded.gold))
    part = encoded.part(np.linspace(0, len(encoded.gold) - 1, count).astype(np.int64))
    model, size = session.fp32_model, session.config.batch_size
    first = part.part(np.arange(1))
    with evaluating(model):
        for each in (first, part):  # the first one warms up
            start = time.perf_counter()
            predict(torch_runner(model), each, pad_id=session.pad_id, batch_size=size, stage="fp32")
    row_s = (time.perf_counter() - start) / part.rows
    rows = sum(each.rows for _, each in session.eval_splits.values())
    run_s = RUN_S + LATENCY_S + rows * row_s * RUN_EVALUATIONS
    calibration_s = CALIBRATION * row_s
    return Pace(
        row_s,
        FAKE_QUANT * row_s,
        calibration_s,
        run_s + session.recipe.calibration.samples * calibration_s,
    )


def of_run(results: Results, rows: int, calibrated: int, latency_s: float) -> Pace | None:
    """From a run; None where a stage that is needed was not timed.

    Args:
        rows: of its evaluation splits.
        calibrated: samples.
    """
    walls = {name: row.wall_s for name, row in results.timings.items()}
    if not {"baseline", "quantize", "fake_quant"} <= set(walls):
        return None
    return Pace(
        walls["baseline"] / rows,
        walls["fake_quant"] / rows,
        walls["quantize"] / calibrated,
        sum(seconds for name, seconds in walls.items() if name not in ("baseline", "qat")) + latency_s,
    )
