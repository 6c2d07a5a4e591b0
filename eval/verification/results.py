"""Records of a verification: an engine against its reference."""

from pathlib import Path
from typing import Literal

from qdqbench.quantize.pipeline.outcomes import VERIFY, Skipped, read_outcome
from qdqbench.quantize.utils.schema import Strict, field


def _within(*pairs: tuple[float | None, float | None]) -> bool:
    """Return whether each value is a number within its limit."""
    return all(value is not None and limit is not None and value <= limit for value, limit in pairs)


class BlockCheck(Strict):
    """One block of the engine that got the reference's own input (teacher forcing); errors are relative.

    None stands for an error that is not a number: the block made NaN or infinity.
    """

    name: str = field("Block: `embeddings`, `layer.0`, ..., `head`.")
    n: int = field("Positions compared, without padding.")
    error: float | None = field("Relative error of the block's output; null if NaN or infinite.")
    quantization_error: float = field("Relative error of the fake-quant block against FP32's.")
    limit: float = field("Limit of `error`: root of 0.01² (BF16: 0.02²) + `quantization_error`².")
    position_error: float | None = field("Relative error at the worst position; null if NaN.")
    position_limit: float = field("Limit: 0.05 (BF16: 0.1) or four times quantization's own error.")
    systematic_error: float | None = field("Part of `error` by an offset and a factor per channel.")
    systematic_limit: float = field("Limit: 0.01 or three standard errors of what such noise explains.")
    nonfinite: int = field("Number of NaN or infinite values.")
    nonfinite_shapes: list[list[int]] = field("Batch and length of each batch with NaN or infinite values.")

    @property
    def holds(self) -> bool:
        position = self.position_error, self.position_limit
        systematic = self.systematic_error, self.systematic_limit
        return not self.nonfinite and _within((self.error, self.limit), position, systematic)


class ShapeCheck(Strict):
    """The deployed engine on one batch of real samples, against the reference."""

    batch: int = field("Samples of the batch.")
    length: int = field("Length in tokens, with padding.")
    what: str = field("Samples: `padded`, `equal lengths` (no padding), `shortest`, `longest`.")
    nonfinite: int = field("Samples with a NaN or infinite logit.")
    max_abs_logit_diff: float | None = field("Largest logit difference from the reference, or null.")


class PaddingCheck(Strict):
    """The same samples alone, padded to the longest length, and inside of the largest batch."""

    n: int = field("Samples.")
    nonfinite: int = field("Samples with a NaN or infinite logit in any setting.")
    mean_abs_logit_diff: float | None = field("Mean spread of a logit over the settings, or null.")
    mean_limit: float = field(
        "Limit of the mean: three times a sum. Its first part is the mean logit difference of fake-quant and "
        "FP32, at least 1% of the logits' root mean square. Its second part is three standard errors of such "
        "a mean over `n` samples. Both are larger the fewer samples tell them."
    )
    max_abs_logit_diff: float | None = field("Largest spread of a logit over the settings, or null.")
    max_limit: float = field("Limit: twice quantization's largest logit difference, at least 10% rms.")

    @property
    def holds(self) -> bool:
        mean, most = (self.mean_abs_logit_diff, self.mean_limit), (self.max_abs_logit_diff, self.max_limit)
        return not self.nonfinite and _within(mean, most)


class PredictionsCheck(Strict):
    """The deployed engine's answers to a draw of real samples, against the reference."""

    n: int = field("Samples drawn.")
    nonfinite: int = field("Samples with a NaN or infinite logit; where there are any, the rest is null.")
    metric: str = field("Primary metric of the task.")
    drop: float | None = field("Metric of the reference minus the engine's; null if not scored.")
    drop_limit: float | None = field("Limit: `max_drop`, and what chance adds in one of 1,000 checks.")
    disagreements: int | None = field("Samples whose predicted class differs; null for regression.")
    disagreement_limit: float | None = field(
        "Limit of `disagreements` in samples: those that quantization itself changes, `max_drop` of "
        "all, and what chance adds to both in one of 1,000 checks; null with them."
    )
    mean_abs_logit_diff: float | None = field("Mean absolute logit difference from the reference.")
    quantization_mean_abs_logit_diff: float = field("Mean logit difference of the reference from FP32.")
    mean_limit: float = field("Limit: twice quantization's mean logit difference, at least 2% rms.")
    ks_statistic: float | None = field("Kolmogorov-Smirnov statistic of the label with the smallest p.")
    ks_p: float | None = field("p-value of `ks_statistic`; null with it.")
    ks_p_limit: float = field("Smallest p-value that passes: 0.001 divided by the number of labels.")

    @property
    def holds(self) -> bool:
        told = ((self.drop, self.drop_limit), (self.disagreements, self.disagreement_limit))
        pairs = [(self.mean_abs_logit_diff, self.mean_limit), *(each for each in told if each[0] is not None)]
        return not self.nonfinite and _within(*pairs, (self.ks_p_limit, self.ks_p))


class Verification(Strict):
    """Outputs of the engine against those of the model that it was made from."""

    reference: Literal["fake_quant", "fp32"] = field("Model to compare with; FP32 without INT8.")
    seed: int = field("Seed of the sample draw.")
    blocks: list[BlockCheck] = field("Embeddings, layers and head, each given the reference's input.")
    blocks_not_checked: str | None = field("Why the graph could not be cut; else null.", default=None)
    stitched_int8_gemms: int = field("INT8 GEMMs of the blocks; the engine's if cutting changed nothing.")
    shapes: list[ShapeCheck] = field("Deployed engine on batches of real samples.")
    padding: PaddingCheck = field("The same samples alone, padded, and inside the largest batch.")
    predictions: PredictionsCheck = field("Predictions of the deployed engine on some samples.")
    warnings: list[str] = field("Known hazards of the backend's version, and limits of this verification.")
    failures: list[str] = field("Reasons why the engine is wrong; each is an issue of the gate too.")
    passed: bool = field("True without failures.")


def read_verified(folder: Path) -> Verification | Skipped:
    path = folder / VERIFY
    return read_outcome(path, Verification) if path.is_file() else Skipped(skipped="not asked for")
