"""Time of a training step (forward, loss, backward, AdamW) of a BERT, unquantized and with fake quantization.

    python tools/benchmark_qat.py --batch 32 --length 128 --model minilm

Variants: `plain`, the model before quantization; `sdpa`, the same with PyTorch's fused attention;
`modelopt`, with ModelOpt's quantizers; `native`, with `quantize/calibration/fakequant/native.py`; `learned`,
with
learned scales. Weights are random, scales come from one random batch. All live in one process and take
turns, a block of steps each, so that every ratio is of neighbors in time. Prints a table for each
precision: the median of the blocks' step times, the median and quartiles of the ratios to `plain`, kernels
of one step (on a CPU: innermost operations, which are more), and peak memory of a GPU.
"""

import argparse
import copy
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import modelopt
import numpy as np
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.training.loop import use_matmul_precision
from qdqbench.quantize.utils.system.quiet import quiet

VARIANTS = ("plain", "sdpa", "modelopt", "native", "learned")
SHAPES = {  # layers, hidden size, heads, feed-forward size
    "tiny": (2, 64, 2, 128),
    "minilm": (6, 384, 12, 1536),
    "bert-base": (12, 768, 12, 3072),
}
NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "detach",
    "view",
    "as_strided",
    "t",
    "transpose",
    "expand",
}
NO_KERNEL |= {"reshape", "unsqueeze", "select", "slice", "alias", "_reshape_alias", "_unsafe_view", "permute"}
NO_KERNEL |= {"result_type", "squeeze", "lift_fresh", "split", "split_with_sizes", "resolve_conj", "set_"}
NO_KERNEL |= {"flatten", "is_nonzero", "expand_as", "view_as", "unbind", "_local_scalar_dense", "item"}
Step = Callable[[], Any]


def main() -> None:
    """Measure and print."""
    options = _options()
    device = torch.device(options.device)
    torch.manual_seed(0)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    hardware = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{options.model} ({' x '.join(map(str, SHAPES[options.model]))}), batch {options.batch}, "
        f"length {options.length}, recipe {options.recipe}{', compiled' if options.compile else ''}\n"
        f"{hardware}; {versions}, modelopt {modelopt.__version__}"
    )
    models = _models(options, device)
    inputs = {k: torch.from_numpy(v).to(device) for k, v in _batch(options.batch, options.length).items()}
    inputs["labels"] = torch.randint(2, (options.batch,), device=device)
    for precision in options.precision:
        steps = {name: _step(model, inputs, precision, options) for name, model in models.items()}
        with use_matmul_precision(precision):
            _table(steps, precision, device, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="minilm")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--recipe", default="bert-int8-linears")
    parser.add_argument(
        "--precision", nargs="+", choices=("fp32", "tf32", "bf16"), default=["fp32", "tf32", "bf16"]
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of steps for each variant")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile every model but modelopt's")
    options = parser.parse_args()
    if "plain" not in options.variants:
        sys.exit("every ratio is to the variant plain; add it to --variants")
    return options


def _batch(batch: int, length: int) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(5, 1000, (batch, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def _models(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One model of each variant, with the same weights."""
    layers, hidden, heads, intermediate = SHAPES[options.model]
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        num_labels=2,
    )
    recipe = load_recipe(options.recipe)
    with tempfile.TemporaryDirectory() as folder, quiet("transformers"):
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
        plain = load_model(folder)
        sdpa = transformers.BertForSequenceClassification.from_pretrained(folder, attn_implementation="sdpa")
    quantized = copy.deepcopy(plain)
    plan = resolve(recipe, module_table(quantized), quantized.base_model_prefix)
    ptq.calibrate(quantized, plan, [_batch(4, options.length)], recipe.calibration)
    models = {"plain": plain, "sdpa": sdpa}
    models |= {name: copy.deepcopy(quantized) for name in ("modelopt", "native", "learned")}
    models = {name: models[name].to(device).train() for name in options.variants}
    if "native" in models:
        native.use_native(models["native"])
    if "learned" in models:
        native.learn_amax(models["learned"])
    return models


def _step(model: Any, inputs: dict[str, torch.Tensor], precision: str, options: argparse.Namespace) -> Step:
    """One training step of a model."""
    kind = inputs["labels"].device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    compiled = options.compile and not any(
        type(m).__module__.startswith("modelopt") and type(m).__name__ == "QuantLinear"
        for m in model.modules()
    )
    run = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(kind, torch.bfloat16, enabled=precision == "bf16"):
            loss = run(**inputs).loss
        loss.backward()
        optimizer.step()
        native.keep_positive(model)

    return step


def _seconds(step: Step, steps: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - start) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kernels(step: Step, device: torch.device) -> int:
    """Kernels that one step launches; on a CPU, operations that compute something."""
    cuda = device.type == "cuda"
    with (
        warnings.catch_warnings(),
        profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])], acc_events=True
        ) as profiler,
    ):
        warnings.simplefilter("ignore")
        step()
        _wait(device)
    events = profiler.events() or []
    if cuda:
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    return sum(_computes(event) and not any(map(_computes, event.cpu_children)) for event in events)


def _computes(event: Any) -> bool:
    """Is it an operation that writes values itself, or through operations that it calls?"""
    name = event.name.removeprefix("aten::")
    return event.name.startswith("aten::") and name not in NO_KERNEL


def _table(steps: dict[str, Step], precision: str, device: torch.device, options: argparse.Namespace) -> None:
    memory: dict[str, float] = {}
    for name, step in steps.items():  # compiles, and fills caches
        for _ in range(3):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            step()
            memory[name] = (torch.cuda.max_memory_allocated(device) - before) / 1e6
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.blocks):
        for name, step in steps.items():
            times[name].append(_seconds(step, options.steps, device))
    print(f"\n{precision}, n = {options.blocks} blocks of {options.steps} steps\n")
    print(f"{'variant':10}{'ms':>9}{'ratio':>8}{'quartiles':>14}{'kernels':>9}{'step MB':>9}")
    for name, step in steps.items():
        ratios = [own / plain for own, plain in zip(times[name], times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(
            f"{name:10}{statistics.median(times[name]) * 1e3:9.2f}{middle:8.2f}"
            f"{f'{low:.2f} to {high:.2f}':>14}{_kernels(step, device):9}"
            f"{f'{memory[name]:.0f}' if name in memory else '-':>9}"
        )


if __name__ == "__main__":
    main()
