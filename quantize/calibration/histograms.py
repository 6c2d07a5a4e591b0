"""Amax of activations by percentile, entropy and MSE, over histograms of bounded size.

Percentile and entropy are ModelOpt's. Its MSE over a histogram is useless in 0.47, which hands the number of
bits to `fake_tensor_quant` in the place of the bias.
"""

import copy
from typing import Any

import numpy as np
import torch

from qdqbench.quantize.calibration.fakequant.modelopt import quantize_with, set_calibrator, set_histogram
from qdqbench.quantize.calibration.fakequant.quantizers import get_quantizer_kind, import_modelopt
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.sections import parse_percentile
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.progress import report_phase

import_modelopt()

from modelopt.torch.quantization.calib import HistogramCalibrator  # noqa: E402
from modelopt.torch.quantization.calib.mse import MseCalibrator  # noqa: E402

BINS = 4096  # the range is at most twice the largest value, so 2,048 bins or more are in use
MAGNITUDES = 128  # magnitudes of INT8: an amax below that many bins is not tried
CANDIDATES = 128  # values of the amax that MSE and entropy try
MAX_COUNT = 2**30  # ModelOpt takes counts as int32
CHUNK = 2**22  # values that are counted at a time: torch.histc counts in float32, which stops at 2^24
WEIGHT_CLIPS = (0.4, 1.0, 0.02)  # smallest and largest part of a weight's max that MSE tries, and the step


def install_calibrators(quantizers: dict[str, Any], plan: Plan) -> None:
    for name, quantizer in quantizers.items():
        method = plan.scaling_of(name.rpartition(".")[0]).method
        if get_quantizer_kind(name) not in ("weight", "softmax") and method != "max":
            set_calibrator(quantizer, ActivationCalibrator(method))


class ActivationCalibrator(HistogramCalibrator):  # type: ignore[misc]  # ModelOpt is untyped
    """One pass over the data, memory of one histogram of |x|, and an amax by the method at the end.

    ModelOpt's own collection adds bins while larger values come, without bound. Here the bins stay and their
    width doubles: pairs are merged, so a count is never wrong, only coarser. Values are counted in chunks
    that float32 counts exactly, and the chunks are added up in int64.
    """

    def __init__(self, method: str) -> None:
        super().__init__(num_bits=8, axis=None, num_bins=BINS)
        self.method = method
        self.counts = np.zeros(BINS, dtype=np.int64)
        self.limit = 0.0  # upper edge of the last bin
        self.largest = 0.0
        self._found: torch.Tensor | None = None

    def collect(self, x: torch.Tensor) -> None:
        """Add |x| of one batch, any shape and floating type; needs memory for CHUNK more values."""
        values = x.detach().flatten()
        low, high = values.aminmax()
        largest = max(-float(low), float(high))
        self._found = None
        if largest == 0:
            self.counts[0] += values.numel()
            return
        while self.limit and largest > self.limit:
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(axis=1), np.zeros(BINS // 2, int)])
            self.limit *= 2
        self.limit = self.limit or largest
        self.largest = max(self.largest, largest)
        for chunk in torch.split(values, CHUNK):
            counts = torch.histc(chunk.float().abs(), bins=BINS, min=0, max=self.limit)
            self.counts += counts.cpu().numpy().astype(np.int64)

    def reset(self) -> None:
        self.counts[:], self.limit, self.largest, self._found = 0, 0.0, 0.0, None

    def compute_amax(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """Return the amax, a float32 scalar, at most the largest value; None when only zeros were seen."""
        if not self.limit:
            return None
        if self._found is None:
            self._found = self._search()
        return self._found

    def compute_amax_by(self, method: str) -> torch.Tensor:
        """Return the amax of what was seen by another method, a float32 scalar."""
        if method == "max":
            return torch.tensor(self.largest, dtype=torch.float32)
        other = copy.copy(self)
        other.method, other._found = method, None
        amax = other.compute_amax()
        assert amax is not None  # the pass refused what is zero everywhere
        return amax

    def _search(self) -> torch.Tensor:
        report_phase("scales from histograms")
        used = int(np.flatnonzero(self.counts)[-1]) + 1
        counts = self.counts[:used]
        # rounded up, so that no outlier is lost
        fewer = torch.from_numpy(-(-counts // (1 + int(counts.sum()) // MAX_COUNT)))
        set_histogram(self, fewer, torch.linspace(0, self.limit, BINS + 1)[: used + 1])
        if self.method == "mse":
            amax = _least_error(counts, self.limit / BINS)
        elif self.method == "entropy":
            amax = super().compute_amax("entropy", start_bin=MAGNITUDES, stride=max(1, used // CANDIDATES))
        else:
            amax = super().compute_amax("percentile", percentile=parse_percentile(self.method))
        # one bin at least: a percentile can fall into the first one, which begins at 0
        return torch.clamp(amax.float().cpu(), min=self.limit / BINS, max=self.largest)


def _least_error(counts: Int64, width: float) -> torch.Tensor:
    """Return the amax with the least squared error of rounding and clipping, by a histogram."""
    centers = (np.arange(len(counts)) + 0.5) * width
    candidates = np.linspace(min(MAGNITUDES, len(counts)), len(counts), CANDIDATES) * width
    scales = candidates[:, None] / (MAGNITUDES - 1)
    rounded = np.clip(np.rint(centers / scales), 0, MAGNITUDES - 1) * scales
    errors = np.square(rounded - centers) @ counts.astype(np.float64)
    return torch.tensor(candidates[int(errors.argmin())], dtype=torch.float32)


def clip_weight(quantizer: Any, weight: torch.Tensor) -> None:
    """Lower the max amax of a weight's quantizer to where the squared error is least, by ModelOpt.

    The amax is per channel or per tensor, the weight float32 [N, K].
    """
    start, stop, step = WEIGHT_CLIPS
    judge = copy.deepcopy(quantizer).cpu()  # for a GPU, ModelOpt would first compile its arithmetic
    calibrator = MseCalibrator(
        judge.amax.clone(),
        axis=judge.axis,
        step_size=step,
        start_multiplier=start,
        stop_multiplier=stop,
        quant_func=lambda x, amax: quantize_with(judge, x, amax),
    )
    calibrator.collect(weight.cpu())
    quantizer.amax = calibrator.compute_amax().to(weight.device)
