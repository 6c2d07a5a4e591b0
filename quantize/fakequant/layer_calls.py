"""One layer of an encoder over many batches, on both of two cores, and what its linears make meanwhile.

Batches depend on nothing of each other, so two threads go through half of them each. What is added up over
them is added in their order all the same, so that no bit depends on the threads.
"""

import operator
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.encoders.runs import hidden_of
from qdqbench.quantize.machine.process import shares_cores

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Given = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer gets for one batch besides the hidden state
Calls = dict[int, "list[torch.Tensor]"]  # by the number of the layer's call, what a module gave in it

_here = threading.local()  # its `call` is the number of the layer's call that this thread is in


def core_is_free(model: "PreTrainedModel") -> bool:
    """Whether torch has one core here as a stage beside has the other, and batches can go side by side.

    Where torch was given one core alone (OMP_NUM_THREADS=1), that is all it gets. ModelOpt's attention keeps
    what is of the whole model while it runs; `native.evaluated` leaves it only where it has quantizers.
    """
    import torch
    from modelopt.torch.quantization.nn import QuantModule

    alone = torch.get_num_threads() == 1 and shares_cores() and model.device.type == "cpu"
    modules = (module for module in model.modules() if isinstance(module, QuantModule))
    return alone and not any(hasattr(module, "q_bmm_quantizer") for module in modules)


def run_layer(  # noqa: PLR0913
    model: "PreTrainedModel",
    name: str,
    times: int,
    given: list[Given],
    states: "list[torch.Tensor]",
    *,
    two_threads: bool,
) -> "list[torch.Tensor]":
    """A layer over every batch without gradients, each as often as it runs; what the next layer reads."""
    import torch

    from qdqbench.quantize.fakequant.onednn import quick_linears

    layer, made, count = model.get_submodule(name), [*states], len(states)

    def some(start: int, step: int) -> None:
        with torch.inference_mode(), quick_linears(model.device.type, again=True):
            for number in range(start, count, step):
                args, kwargs = given[number]
                for time in range(times):
                    _here.call = time * count + number
                    made[number] = hidden_of(layer(made[number], *args, **kwargs))

    if not two_threads:
        some(0, 1)
        return made
    with ThreadPoolExecutor(1, "batches") as pool:
        others = pool.submit(some, 1, 2)
        some(0, 2)
        others.result()
    return made


@contextmanager
def mean_outputs(model: "PreTrainedModel", names: Iterable[str]) -> "Iterator[dict[str, torch.Tensor]]":
    """Mean output of linears over all tokens, float64 [N]; filled when the block ends."""
    sums: dict[str, Calls] = {}
    tokens: dict[str, list[int]] = {}
    result: dict[str, torch.Tensor] = {}

    def watch(name: str, _: Any, __: Any, output: "torch.Tensor") -> None:
        flat = output.detach().flatten(0, -2)
        sums[name].setdefault(_here.call, []).append(flat.double().sum(dim=0))
        tokens[name].append(len(flat))

    with ExitStack() as hooks:
        for name in names:
            sums[name], tokens[name] = {}, []
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(watch, name)))
        yield result
    for name, found in sums.items():
        total = reduce(operator.add, chain.from_iterable(found[call] for call in sorted(found)))
        result[name] = total / sum(tokens[name])


@contextmanager
def kept_outputs(model: "PreTrainedModel", groups: list[list[str]]) -> "Iterator[dict[str, Calls]]":
    """Outputs of linears while the block runs, by name."""
    names = [*chain.from_iterable(groups)]
    found: dict[str, Calls] = {name: {} for name in names}

    def keep(name: str, _: Any, __: Any, output: "torch.Tensor") -> None:
        found[name].setdefault(_here.call, []).append(output.clone())

    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(keep, name)))
        yield found


@contextmanager
def replayed(model: "PreTrainedModel", groups: list[list[str]], made: "dict[str, Calls]") -> Iterator[None]:
    """Let linears give what they made before, without computing it again."""
    names = list(chain.from_iterable(groups))
    linears: list[Any] = [model.get_submodule(name) for name in names]
    for name, linear in zip(names, linears, strict=True):
        outputs = {call: iter(found) for call, found in made[name].items()}
        linear.forward = lambda _, outputs=outputs: next(outputs[_here.call]).clone()
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward
