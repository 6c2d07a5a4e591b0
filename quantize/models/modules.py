"""Table of a model's modules by class and place, which recipes match; and its layers as they run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.identity import POOLING_CLASS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModuleInfo:
    # Linear, LayerNorm, Embedding, Attention, Softmax (virtual, one per attention), Residual (what adds one
    # before its LayerNorm), Pooling (from the last hidden state to a sentence embedding) or other
    kind: str
    head_size: int | None = None  # of an Attention


def module_table(model: "PreTrainedModel") -> dict[str, ModuleInfo]:
    from torch import nn

    family = family_of(model.config)
    table: dict[str, ModuleInfo] = {}
    for name, module in model.named_modules():
        plain = [each for each in (nn.Linear, nn.LayerNorm, nn.Embedding) if isinstance(module, each)]
        if plain:
            kind = plain[0].__name__
        elif (place := family.place(name)) and place.path == family.attention:
            table[name] = ModuleInfo("Attention", head_size=int(getattr(module, family.head_size)))
            table[f"{name}.softmax"] = ModuleInfo("Softmax")
            continue
        elif family.adds_residual(name):
            kind = "Residual"
        elif type(module).__name__ == POOLING_CLASS:
            kind = "Pooling"
        else:
            kind = "other"
        table[name] = ModuleInfo(kind)
    return table


@contextmanager
def resume_from(
    model: "PreTrainedModel", start: int, hidden: "torch.Tensor | None", stop: int | None = None
) -> Iterator[list[Any]]:
    """Let a model resume from a hidden state in the block, whatever its tokens are; its own `forward` runs.

    Args:
        start: run of a layer that `hidden` is the input of, from 1 on; as many as there are: the head.
        hidden: [B, L, hidden], with fewer tokens where only the first are read; None: the embeddings'.
        stop: the run before which the layers end; the logits then mean nothing. None: all runs.

    Yields:
        Hidden states behind the last run before `stop`, one for each call of the model.
    """
    family = family_of(model.config)
    names = family.runs(model)
    stop = len(names) if stop is None else stop
    outputs: list[Any] = []

    def run(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = next(numbers) % len(names)
        if not start <= number < stop:
            passed = args[0] if hidden is None else hidden
            return (passed, None) if family.layers_return_tuples else passed
        if hidden is not None and number == start:
            args = (hidden, *args[1:])
        output = own(*args, **kwargs)
        if number == stop - 1:
            outputs.append(get_hidden(output))
        return output

    numbers = count()
    layers: list[Any] = [model.get_submodule(name) for name in dict.fromkeys(names)]
    for layer in layers:
        layer.forward = partial(run, layer.forward)
    try:
        yield outputs
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def record_first_inputs(model: "PreTrainedModel") -> "Iterator[list[torch.Tensor]]":
    """Record what the first layer reads in the block, [B, L, hidden] for each call of the model."""
    names = family_of(model.config).runs(model)
    numbers, states = count(), []

    def keep(_: Any, inputs: tuple[Any, ...]) -> None:
        if next(numbers) % names.count(names[0]) == 0:  # of a shared layer the first run
            states.append(inputs[0])

    with model.get_submodule(names[0]).register_forward_pre_hook(keep):
        yield states


def get_hidden(output: Any) -> "torch.Tensor":
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]
