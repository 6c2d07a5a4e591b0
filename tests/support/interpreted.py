"""The engine of backend cuda without a GPU: its plan is computed by the interpreter, on buffers of torch."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch

from qdqbench.quantize.engine import backend
from qdqbench.quantize.engine.cpu_runtimes import CompiledModel, Kernel, Signature
from qdqbench.quantize.engine.cuda import file as files
from qdqbench.quantize.engine.cuda.file import list_rows, read_file
from qdqbench.quantize.engine.cuda.interpret import compute, interpret
from qdqbench.quantize.engine.cuda.names import list_kernels
from qdqbench.quantize.engine.cuda.runtime import PACKED
from qdqbench.quantize.engine.cuda.tokens import Tokens, pack_rows
from qdqbench.quantize.utils.system.gpu import Gpu

H200 = Gpu("NVIDIA H200", "9.0", None)


class Bound:
    """Launches of one size: the answers of the first tokens and rows are computed, the rest is NaN."""

    detail = "CUDA graph"

    def __init__(self, engine: "Interpreted", tokens: int, rows: int) -> None:
        self.engine, self.tokens, self.stream = engine, tokens, SimpleNamespace(synchronize=lambda: None)
        self.inputs = {PACKED: torch.zeros(5 * tokens + rows + 1, dtype=torch.int32)}
        one = engine.answer(Tokens(*np.zeros((3, 1), np.int32), np.array([0, 1]), np.ones(1, bool), {}))
        count = tokens if engine.by_token else rows
        shapes = {name: (count, *answer.shape[1:]) for name, answer in one.items()}
        self.outputs = self.whole = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}

    def launch(self) -> None:
        given = self.inputs[PACKED].numpy()
        ids, positions, types, start, end = given[: 5 * self.tokens].reshape(5, self.tokens)
        bounds = given[5 * self.tokens :]
        used, lengths = bounds[-1], np.diff(bounds)
        assert (start[:used] == np.repeat(bounds[:-1], lengths)).all()
        assert (end[:used] == np.repeat(bounds[1:], lengths)).all()
        rows = np.flatnonzero(lengths)
        starts = bounds[: rows[-1] + 2]
        packed = Tokens(ids[:used], positions[:used], types[:used], starts, np.ones(used, bool), {})
        for name, answer in self.engine.answer(packed).items():
            self.whole[name][: len(answer)] = torch.from_numpy(answer)


class Interpreted(CompiledModel):
    """The plan of an engine file, computed by NumPy."""

    def __init__(self, plan, arrays) -> None:
        self.plan, self.arrays = plan, arrays
        self.inputs = {name: Signature(np.dtype(np.int64), (None, None)) for name in plan.inputs}
        self.outputs = [*(each.name for each in plan.head.answers), *plan.states]
        self.by_token = plan.head.pooling == "tokens"
        self.lanes = [lambda feeds: interpret(plan, arrays, feeds)]

    def launch(self, ids, types, lengths):
        answers = self.answer(pack_rows(self.plan, self.arrays, ids, types, lengths))
        return SimpleNamespace(query=lambda: True, read=lambda: answers)

    def blob(self):
        raise NotImplementedError

    def kernels(self):
        return [Kernel(row, 0.5) for row in list_rows(self.plan)]

    def values(self, tokens):
        """All tensors of the plan."""
        values = {}
        for operation in self.plan.operations:
            values |= compute(operation, self.plan, self.arrays, values, tokens)
        return values

    def answer(self, tokens):
        values = self.values(tokens)
        return {each.name: values[each.name] for each in self.plan.head.answers}

    def load(self, tokens):
        return tokens

    def forward(self, tokens, kept):
        values = self.values(tokens)
        spare = {name: np.concatenate([value, value[-1:]]) for name, value in values.items()}  # of a bucket
        kept |= {name: torch.from_numpy(spare[name]) for name in self.plan.tensors}
        return {each.name: torch.from_numpy(spare[each.name]) for each in self.plan.head.answers}

    def bind(self, tokens, rows, longest, reach):
        assert tokens % 64 == 0
        assert reach in (128, 256, 384, 512)
        assert 1 <= longest <= tokens
        return Bound(self, tokens, rows)


def load_interpreted(path):
    """Stand in for `load_kernels`."""
    return Interpreted(*read_file(path)[:2]), 1_000_000


def use_host(monkeypatch) -> None:
    """Let torch's buffers for a GPU be buffers of the host."""
    for name in ("cuda", "pin_memory"):
        monkeypatch.setattr(torch.Tensor, name, lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())


def use_no_nvrtc(monkeypatch) -> None:
    """Let cubins hold the names of kernels alone."""

    def compile_kernels(plan, targets):
        named = {each.name: sorted(list_kernels(plan, each)) for each in targets}
        return {
            each: {"gemm": "".join(f"\0.text.{name}\0" for name in made).encode()}
            for each, made in named.items()
        }

    monkeypatch.setattr(files, "compile_kernels", compile_kernels)
    monkeypatch.setattr(files, "find_products", lambda _: {})
    monkeypatch.setattr(backend, "load_nvrtc", lambda: None)


def use_hopper(monkeypatch) -> None:
    """Let the interpreter of plans be a GPU that backend cuda finds."""
    # heads of tiny models
    monkeypatch.setattr("qdqbench.quantize.engine.cuda.check.ATTENTION_SIZES", (16, 32, 64, 128))
    use_no_nvrtc(monkeypatch)
    engine = "quantize.engine"
    for module in (
        "eval.stages.stages",
        "eval.verification.bisect",
        f"{engine}.sidecar",
        f"{engine}.runtime.runners",
        "quantize.lint.inspect_target",
    ):
        monkeypatch.setattr(f"qdqbench.{module}.find_gpu", lambda: H200)
    for module in (f"{engine}.runtime.runners", "eval.verification.bisect"):
        monkeypatch.setattr(f"qdqbench.{module}.load_kernels", load_interpreted)
