"""An engine of backend cuda that records launches on a CPU, and holds each pointer to what lies behind it."""

import ctypes as c

import torch

from qdqbench.quantize.engine.cuda import driver, runtime


class Recorder:
    """In place of the kernels of a GPU."""

    def __init__(self):
        self.kept = []  # else memory that is freed is handed out again
        self.spans = {}  # bytes from an address on
        self.faults = []
        self.shared = 0  # bytes of a block, at most

    def keep(self, tensor):
        self.kept.append(tensor)
        self.spans[tensor.data_ptr()] = tensor.nbytes
        return tensor

    def launch(self, name, grid, block, arguments, shared=0):
        self.shared = max(self.shared, shared)
        match arguments[-1]:
            case driver.GemmArguments() as call:
                if isinstance(arguments[0], c.c_void_p):
                    self._hold_split(name, grid, arguments)
                else:
                    self._hold_shapes(name, *arguments)
                self._hold_gemm(name, call)
            case driver.AttentionArguments() as call:
                self._hold_attention(name, call)
            case driver.NormArguments() as call:
                self._hold_norm(name, arguments[0], call)
            case driver.DenseArguments() as call:
                self._hold_dense(name, call)
            case _:
                source, factor, made, rows, channels = (each.value for each in arguments)
                sizes = {"source": (source, 2 * rows * channels), "factor": (factor, 4 * channels)}
                self._hold(name, **sizes, made=(made, rows * channels))
                self._require(name, channels % 4 == 0)

    def _hold_shapes(self, name, source, weight, call):
        self._require(name, list(source.shape) == [call.m, call.k] and weight.shape[1] == call.k)
        self._require(name, len(weight) >= call.n)

    def _hold_split(self, name, grid, arguments):
        source, weight, split, call = arguments
        self._hold(name, source=(source.value, call.m * call.k), weight=(weight.value, call.n * call.k))
        m, n = map(int, name.split("_")[1:3])
        tiles = -(-call.m // m) * -(-call.n // n)
        if split.parts > 1:
            self._hold(name, done=(split.done, 4 * tiles), sums=(split.sums, 4 * m * n * tiles * split.parts))
        self._require(name, grid[0] <= tiles * split.parts)

    def _hold_gemm(self, name, call):
        self._require(name, call.n % 16 == 0 and call.k % 16 == 0)
        self._hold(name, scale=(call.scale, 4 * call.n), bias=(call.bias, 4 * call.n))
        kinds = name.split("_")[-2:]  # of the residual and the output
        residual, made = (call.m * call.n * (2 if kind == "fp16" else 1) for kind in kinds)
        self._hold(name, out=(call.out, made))
        if kinds[0] != "none":
            self._hold(name, residual=(call.residual, residual))
        if call.factor or kinds[0] == "int8":
            self._hold(name, factor=(call.factor, 4 * call.n))

    def _hold_attention(self, name, call):
        rows, tokens = (call.tokens - 1) * call.pitch + call.hidden, 4 * call.tokens
        for part in "qkv":
            self._hold(name, **{part: (getattr(call, part), rows)})
            self._require(name, getattr(call, part) % 16 == 0 and call.pitch % 16 == 0)
        self._hold(name, start=(call.start, tokens), end=(call.end, tokens))
        self._hold(name, out=(call.out, call.tokens * call.hidden), factor=(call.factor, 4 * call.hidden))
        if "biased" in name:
            heads = call.hidden // int(name.split("_")[1])
            self._hold(name, bias=(call.bias, 4 * heads * (2 * call.span - 1)))

    def _hold_norm(self, name, first, call):
        values = call.tokens * call.hidden
        self._hold(name, gamma=(call.gamma, 4 * call.hidden), beta=(call.beta, 4 * call.hidden))
        self._require(name, call.hidden % 8 == 0)
        if call.half:
            self._hold(name, half=(call.half, 2 * values))
        for codes, factor in zip(call.codes, call.multiplier, strict=True):
            if codes:
                self._hold(name, codes=(codes, values), multiplier=(factor, 4 * call.hidden))
        if isinstance(first, driver.TableArguments):
            for part in ("word", "position", "type"):
                self._hold(name, **{part: (getattr(first, part), 2 * call.hidden)})
        else:
            self._hold(name, input=(first.value, 2 * values))

    def _hold_dense(self, name, call):
        self._hold(name, weight=(call.weight, 2 * call.n * call.k), bias=(call.bias, 2 * call.n))
        self._hold(name, made=(call.half or call.single, call.rows * call.n * (2 if call.half else 4)))
        self._hold(name, x=(call.x, 2 * (call.tokens if call.bounds else call.rows) * call.k))

    def _require(self, name, right):
        if not right:
            self.faults.append(f"{name} gets sizes that it does not take")

    def _hold(self, name, **given):
        for part, (pointer, size) in given.items():
            start = max((each for each in self.spans if each <= (pointer or 0)), default=0)
            if not pointer or pointer - start + size > self.spans.get(start, 0):
                self.faults.append(f"{name} reads or writes {size} bytes of {part}, which has fewer")


class RecordedEngine(runtime.CudaEngine):
    """Computes nothing: tensors are zeros."""

    device = "cpu"

    def _load(self, codes):
        self._kernels = Recorder()
        self._multiprocessors = 2

    def _make(self, name, tokens):
        return self._kernels.keep(super()._make(name, tokens).zero_())

    def _codes(self, source, name, factor=""):
        return super()._codes(self._kernels.keep(source.contiguous()), name, factor)

    def _dense(self, name, x, *rest):
        empty = torch.empty
        try:
            torch.empty = lambda *given, **more: self._kernels.keep(empty(*given, **more).zero_())
            return super()._dense(name, self._kernels.keep(x), *rest)
        finally:
            torch.empty = empty


def record_launches(engine, tokens):
    """Return what is wrong with the launches of a batch."""
    recorder = engine._kernels
    for array in (*engine._arrays.values(), engine._scratch):
        recorder.keep(array)
    rows = engine.load(tokens)
    for each in (rows.ids, rows.positions, rows.types, rows.start, rows.end, rows.bounds):
        recorder.keep(each)
    with torch.no_grad():
        engine.forward(rows)
    return recorder.faults
