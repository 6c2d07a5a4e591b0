"""A calibrated model whose tensors go between FP32 and INT8 one by one, and which runs from any layer on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.runs import record_first_inputs, resume_from
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.tasks.task import kind_of
from qdqbench.quantize.tasks.types.encoded import Encoded, IndexedBatch
from qdqbench.quantize.utils.arrays import Batch, Float32, Int64

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Held:
    """One batch at the input of an encoder layer."""

    rows: Int64  # of the draw, [B]
    batch: Batch
    hidden: torch.Tensor  # [B, L, hidden]


class Suffixes:
    """Answers of a model to a draw, computed from the input of any encoder layer on."""

    def __init__(self, model: "PreTrainedModel", batches: list[IndexedBatch], encoded: Encoded) -> None:
        """`batches` are those that `sorted_batches` makes of `encoded`.

        Where the head reads the first token only, the others are not computed behind the attention of the
        last layer. What the first token gets is not changed by it.
        """
        self.model, self.batches, self.encoded = model, batches, encoded
        family = family_of(model.config)
        self.layers = family.runs(model)  # a shared one as often as it runs
        firsts = [self.layers.index(name) for name in family.layer_names(model)]
        self.starts = [*firsts, len(self.layers)]  # first run of each layer, and the head
        kind = kind_of(type(model).__name__)
        cut = kind is not None and kind.reads_first_token
        for residual in family.residuals[:1] if cut else ():  # a module with these two tensors as its inputs
            model.get_submodule(f"{self.layers[-1]}.{residual.module}").register_forward_pre_hook(
                lambda _, inputs: tuple(tensor[:, :1] for tensor in inputs)
            )

    def start(self) -> tuple[list[Held], Float32]:
        """States at the input of the first layer, and logits, in whatever precision the model is now."""
        with record_first_inputs(self.model) as found:
            logits = self.full()
        states = zip(self.batches, found, strict=True)
        return [Held(rows, batch, hidden) for (rows, batch), hidden in states], logits

    def full(self) -> Float32:
        """Answers [answers, width] of the whole model."""
        return self._gather((rows, quantizers.forward(self.model, batch)) for rows, batch in self.batches)

    def suffix(self, states: list[Held], layer: int) -> Float32:
        """Answers [answers, width] from states at the input of `layer`, which may be the head's number."""

        def logits() -> Iterator[tuple[Int64, torch.Tensor]]:
            for state in states:
                with resume_from(self.model, layer, state.hidden):
                    yield state.rows, quantizers.forward(self.model, state.batch)

        return self._gather(logits())

    def advance(self, states: list[Held], layer: int) -> list[Held]:
        """States behind `layer`."""
        found = []
        for state in states:
            with resume_from(self.model, layer, state.hidden, layer + 1) as made:
                quantizers.forward(self.model, state.batch)
            found.append(replace(state, hidden=made[0]))
        return found

    def _gather(self, parts: Iterator[tuple[Int64, torch.Tensor]]) -> Float32:
        found = [(rows, self.encoded.kept(rows, made).float().cpu().numpy()) for rows, made in parts]
        answers = np.empty((self.encoded.answers.sum(), found[0][1].shape[1]), dtype=np.float32)
        for rows, values in found:
            answers[self.encoded.answers_of(rows)] = values
        return answers


@contextmanager
def watch_norms(model: "PreTrainedModel", settings: Calibration) -> Iterator[Callable[[], dict[str, Any]]]:
    """Watch the input of every LayerNorm of the encoder while the model is calibrated around it.

    Yields:
        Function that gives the amax of each by the method of the calibration section, float32 scalars.
    """
    quantizers.import_modelopt()  # first, for it keeps ModelOpt's warnings from the user
    from modelopt.torch.quantization.calib import MaxCalibrator

    from qdqbench.quantize.calibration.histograms import ActivationCalibrator

    family = family_of(model.config)
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.LayerNorm) and family.layer_of(name) is not None
    }
    by_max = settings.method == "max"
    seen: dict[str, Any] = {
        name: MaxCalibrator(num_bits=8, axis=None) if by_max else ActivationCalibrator(settings.method)
        for name in norms
    }

    def hook(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        return lambda _, inputs: seen[name].collect(inputs[0].detach())

    hooks = [module.register_forward_pre_hook(hook(name)) for name, module in norms.items()]
    try:
        yield lambda: {name: calibrator.compute_amax() for name, calibrator in seen.items()}
    finally:
        for handle in hooks:
            handle.remove()
