"""Bias correction: give each INT8 linear the mean output that it had in FP32.

Nagel et al. 2019, arXiv 1906.04721, section 4.2, in the order of execution: each linear is corrected for what
the corrected layers before it give. One that runs several times gets one correction, for all of its runs. A
few tokens with huge outliers can dominate the mean, which then fits no other token. So a correction is undone
if it does not bring the output of its layer nearer to FP32.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.calibration.fakequant import quantizers as fake
from qdqbench.quantize.calibration.techniques import Change
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.modules import get_hidden, record_first_inputs, resume_from
from qdqbench.quantize.recipe.plan import Plan, list_bias_free_linears
from qdqbench.quantize.utils.arrays import Batch
from qdqbench.quantize.utils.names import count_of, name_list
from qdqbench.quantize.utils.progress import track

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a layer for one batch, without the hidden state
TOKENS = 2**12  # what is averaged is small and paired; bounds the time, and what is held in memory


def list_changes(plan: Plan, biases: Collection[str]) -> list[Change]:
    tried = count_of(len(plan.int8.keys() - list_bias_free_linears(plan)), "INT8 linear")
    gained = (
        f"The biases of {{}} of {tried} make up for the mean error of rounding; the others gained nothing."
    )
    return [("bias correction", len(biases), "linear", gained)]


def correct_biases(
    model: "PreTrainedModel", linears: Iterable[str], batches: Iterable[Batch]
) -> dict[str, list[float]]:
    """Correct the biases of the encoder's quantized linears, in place; return the additions.

    Quantizers that are disabled stay so; linears outside of encoder layers or without bias are left. Of the
    batches, int64 [B, L] without padding, as many as make `TOKENS` tokens are used and held.
    """
    import torch

    family = family_of(model.config)
    linears = [name for name in linears if model.get_submodule(name).bias is not None]
    if not linears:
        return {}
    runs = Counter(family.runs(model))
    added: dict[str, list[float]] = {}
    with torch.inference_mode():
        with fake.quantizers_off(model):
            exact, calls = record_calls(model, runs, batches, TOKENS)
        states = exact
        for name, times in track("bias correction", runs.items()):
            run = partial(run_layer, model, name, times, calls[name])
            by_kind: dict[str, list[str]] = {}  # in the order in which they run; q, k and v run side by side
            for linear in linears:
                if linear.startswith(f"{name}."):
                    by_kind.setdefault(family.kind(linear), []).append(linear)
            groups = list(by_kind.values())
            with fake.quantizers_off(model), average_outputs(model, chain.from_iterable(groups)) as targets:
                exact = run(exact)
            with fake.use_rounded_weights(model, chain.from_iterable(groups)):
                corrected, states = _correct_layer(
                    model, groups, targets, partial(run, states), exact, once=times == 1
                )
            added |= corrected
    return added


def _correct_layer(  # noqa: PLR0913
    model: "PreTrainedModel",
    groups: list[list[str]],
    targets: "dict[str, torch.Tensor]",
    run: "Callable[[], list[torch.Tensor]]",
    exact: "list[torch.Tensor]",
    *,
    once: bool,
) -> "tuple[dict[str, list[float]], list[torch.Tensor]]":
    """Correct the groups of one layer, each for what it gets after the one before was corrected.

    With `once` the layer runs once for a batch, so that what linears before a group make is known by then.
    Returns the additions to each bias, and the output of the layer with them for every batch.
    """
    added: dict[str, list[float]] = {}
    read_again = groups[:-1] if once else []
    with (
        average_outputs(model, chain.from_iterable(groups)) as means,
        keep_outputs(model, read_again) as kept,
    ):
        states = run()
    error = _error(states, exact)
    for number, group in enumerate(groups):
        step = {name: (targets[name] - means[name]).float().cpu().tolist() for name in group}
        linears: dict[str, Any] = {name: model.get_submodule(name) for name in group}
        before = {name: linear.bias.clone() for name, linear in linears.items()}  # subtracting would round
        apply_biases(model, step)
        with (
            replay_outputs(model, read_again[:number], kept),
            average_outputs(model, chain.from_iterable(groups[number + 1 :])) as new_means,
            keep_outputs(model, read_again[number:]) as newly_kept,
        ):
            new_states = run()
        if (now := _error(new_states, exact)) < error:
            added, error, means, states = added | step, now, new_means, new_states
            kept |= newly_kept
        else:
            for name, bias in before.items():
                linears[name].bias.copy_(bias)
    return added, states


def _error(states: "list[torch.Tensor]", exact: "list[torch.Tensor]") -> float:
    return sum(
        float((ours - theirs).double().square().sum()) for ours, theirs in zip(states, exact, strict=True)
    )


def note_missing_biases(model: "PreTrainedModel", linears: Iterable[str]) -> list[str]:
    family = family_of(model.config)
    inside = [name for name in linears if family.layer_of(name) is not None]
    lost = [name for name in inside if model.get_submodule(name).bias is None]
    count = f"{len(lost)} of {len(inside)}"
    note = f"bias correction left out {count} INT8 linears, which have no bias: {name_list(lost)}"
    return [note] if lost else []


def apply_biases(model: "PreTrainedModel", added: dict[str, list[float]]) -> None:
    for name, values in added.items():
        bias: Any = model.get_submodule(name).bias
        bias.data += bias.new_tensor(values)


@contextmanager
def add_biases_temporarily(
    model: "PreTrainedModel", added: Iterable[dict[str, list[float]]]
) -> Iterator[None]:
    """Add to the biases of a model for a while; they are as they were afterwards, bit for bit."""
    before: dict[str, torch.Tensor] = {}
    try:
        for part in added:
            biases = {name: model.get_parameter(f"{name}.bias").data for name in part}
            before = {name: bias.clone() for name, bias in biases.items()} | before
            apply_biases(model, part)
        yield
    finally:
        for name, was in before.items():
            model.get_parameter(f"{name}.bias").data.copy_(was)


def run_layer(
    model: "PreTrainedModel", name: str, times: int, calls: list[Arguments], states: "list[torch.Tensor]"
) -> "list[torch.Tensor]":
    """Run a layer `times` times over every batch; return what the next layer reads."""
    layer, outputs = model.get_submodule(name), [*states]
    for _ in range(times):
        for number, (args, kwargs) in enumerate(calls):
            outputs[number] = get_hidden(layer(outputs[number], *args, **kwargs))
    return outputs


@contextmanager
def average_outputs(model: "PreTrainedModel", names: Iterable[str]) -> "Iterator[dict[str, torch.Tensor]]":
    """Average the output of linears over all tokens: float64 [N] each, filled when the block ends."""
    sums: dict[str, list[torch.Tensor]] = {}
    tokens: Counter[str] = Counter()
    means: dict[str, torch.Tensor] = {}

    def add(name: str, _: Any, __: Any, output: "torch.Tensor") -> None:
        flat = output.detach().flatten(0, -2)
        sums.setdefault(name, []).append(flat.double().sum(dim=0))
        tokens[name] += len(flat)

    with fake.hooked(model, names, add):
        yield means
    means |= {name: reduce(operator.add, parts) / tokens[name] for name, parts in sums.items()}


@contextmanager
def keep_outputs(
    model: "PreTrainedModel", groups: list[list[str]]
) -> "Iterator[dict[str, list[torch.Tensor]]]":
    """Keep the outputs of linears while the block runs, in order, by name."""
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, _: Any, __: Any, output: "torch.Tensor") -> None:
        outputs.setdefault(name, []).append(output.clone())

    with fake.hooked(model, chain.from_iterable(groups), keep):
        yield outputs


@contextmanager
def replay_outputs(
    model: "PreTrainedModel", groups: list[list[str]], outputs: "dict[str, list[torch.Tensor]]"
) -> Iterator[None]:
    linears: dict[str, Any] = {name: model.get_submodule(name) for group in groups for name in group}
    for name, linear in linears.items():
        linear.forward = partial(lambda kept, _: next(kept).clone(), iter(outputs[name]))
    try:
        yield
    finally:
        for linear in linears.values():
            del linear.forward


def record_calls(
    model: "PreTrainedModel", runs: Counter[str], batches: Iterable[Batch], enough: float = math.inf
) -> "tuple[list[torch.Tensor], dict[str, list[Arguments]]]":
    """Record what the first layer reads for enough tokens, and what all get besides; no layer runs."""
    calls: dict[str, list[Arguments]] = {name: [] for name in runs}
    tokens = 0

    def keep(name: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[name].append((args[1:], kwargs))

    with (
        record_first_inputs(model) as states,
        fake.hooked(model, runs, keep, before=True, with_kwargs=True),
        resume_from(model, sum(runs.values()), None),
    ):
        for batch in batches:
            fake.forward(model, batch)
            tokens += batch["input_ids"].size
            if tokens >= enough:
                break
    # a shared layer gets the same in each of its runs
    return states, {name: of_layer[:: runs[name]] for name, of_layer in calls.items()}
