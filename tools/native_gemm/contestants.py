"""What multiplies matrices: our kernels, CUTLASS's of gemm.cu, the Triton kernel, cuBLASLt and PyTorch."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from qdqbench.quantize.engine.cuda.compile import compile_source
from qdqbench.quantize.engine.cuda.driver import GemmArguments, Kernels
from qdqbench.quantize.engine.cuda.names import Tile as OwnTile
from qdqbench.quantize.engine.cuda.runtime import launch_gemm, permute_rows

SOURCE = Path(__file__).parent / "gemm.cu"
FLAGS = "-std=c++17 -O3 -DNDEBUG --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a "
FLAGS += "-shared -Xcompiler -fPIC -w"
WORKSPACE = 64 << 20  # bytes; only stream-K takes much
HALF, CODES, GELU, RESIDUAL = 0, 1, 2, 3  # epilogues of gemm.cu
FLIPS = 0.03  # part of the codes that may be off by one: roundings on a border, and tanh of the chip


@dataclass(frozen=True)
class Tile:
    """A kernel of gemm.cu."""

    m: int
    n: int
    k: int = 128
    cluster: tuple[int, int] = (1, 1)
    pingpong: bool = False  # else cooperative: two warp groups share a tile
    stream_k: bool = False

    @property
    def name(self) -> str:
        form = "pingpong" if self.pingpong else "cooperative"
        extra = " stream-K" if self.stream_k else ""
        return f"{self.m}x{self.n}x{self.k} {self.cluster[0]}x{self.cluster[1]} {form}{extra}"

    @property
    def macros(self) -> list[str]:
        values = {"TILE_M": self.m, "TILE_N": self.n, "TILE_K": self.k, "CLUSTER_M": self.cluster[0]}
        values |= {
            "CLUSTER_N": self.cluster[1],
            "PINGPONG": int(self.pingpong),
            "STREAM_K": int(self.stream_k),
        }
        return [f"-D{name}={int(value)}" for name, value in values.items()]


TILES = [
    Tile(128, 128, cluster=(2, 1), pingpong=True),
    Tile(128, 256, cluster=(2, 1)),
    Tile(128, 192, cluster=(2, 1)),
    Tile(256, 128, cluster=(2, 1)),
    Tile(128, 128, pingpong=True),
    Tile(64, 128, pingpong=True),
    Tile(64, 256, pingpong=True),
    Tile(64, 64, pingpong=True),
    Tile(64, 32, pingpong=True),
    Tile(128, 256, cluster=(1, 1)),
    Tile(128, 128, stream_k=True),
]


@dataclass
class Operands:
    """One linear of a model at one size, with weights for every launch of a burst."""

    tokens: int
    n: int
    k: int
    epilogue: int
    inputs: list[torch.Tensor]  # int8 [tokens, K]
    weights: list[torch.Tensor]  # int8 [N, K]
    sources: list[torch.Tensor]  # float16 [tokens, N]
    outputs: list[torch.Tensor]  # [tokens, N]
    scale: torch.Tensor  # float32 [N]
    bias: torch.Tensor  # float32 [N]
    next_scale: float

    @classmethod
    def random(cls, tokens: int, n: int, k: int, epilogue: int, weights: int) -> "Operands":
        """Codes as quantizers make them: normal, amax at 5 standard deviations; x is about normal too."""

        def codes(rows: int) -> torch.Tensor:
            return torch.randn(rows, k, device="cuda").mul_(25).round_().clamp_(-127, 127).to(torch.int8)

        coded = epilogue in {CODES, GELU}
        spread = 25.0 if epilogue == CODES else 1.0
        kind = torch.int8 if coded else torch.float16
        return cls(
            tokens, n, k, epilogue,
            [codes(tokens) for _ in range(3)],
            [codes(n) for _ in range(weights)],
            [torch.randn(tokens, n, device="cuda").half() for _ in range(3 if epilogue == RESIDUAL else 1)],
            [torch.empty(tokens, n, dtype=kind, device="cuda") for _ in range(3)],
            (torch.rand(n, device="cuda") + 0.5) * (spread / (625 * k**0.5)),
            torch.randn(n, device="cuda") * spread * 0.1,
            30.0,
        )  # fmt: skip

    def launches(self):
        """What each launch of a burst reads and writes: other weights each, as the layers of a model have."""
        for number, weight in enumerate(self.weights):
            yield (
                self.inputs[number % 3],
                weight,
                self.sources[number % len(self.sources)],
                self.outputs[number % 3],
            )

    def wrong(self) -> str:
        """Why the output of the last launch is wrong, or nothing."""
        a, b, source, output = list(self.launches())[-1]
        x = torch._int_mm(a, b.t()).float() * self.scale + self.bias
        if self.epilogue == GELU:
            x = torch.nn.functional.gelu(x, approximate="tanh") * self.next_scale
        if self.epilogue == RESIDUAL:
            x += source
        got = output.float()
        if self.epilogue in {CODES, GELU}:
            off = (got - x.round().clamp(-128, 127)).abs()
            worst, part = float(off.max()), float((off > 0).float().mean())
            return "" if worst <= 1 and part < FLIPS else f"codes off by {worst:.0f}, {part:.2%} of them"
        worst = float((got - x).abs().max())
        return (
            "" if worst < 5e-3 * float(x.abs().max()) else f"off by {worst:.3g} of {float(x.abs().max()):.3g}"
        )


class Cutlass:
    """Compiled kernels of gemm.cu, one library a tile."""

    def __init__(self, tile: Tile, path: Path) -> None:
        self.name, self._call = f"CUTLASS {tile.name}", ctypes.CDLL(str(path)).native_gemm
        pointer = ctypes.c_void_p
        self._call.argtypes = [ctypes.c_int, *[pointer] * 5, ctypes.c_float, pointer, *[ctypes.c_int] * 5]
        self._call.argtypes += [pointer, ctypes.c_size_t, pointer]
        self._count = torch.cuda.get_device_properties(0).multi_processor_count
        self._space = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

    def run(self, made: Operands, swizzle: int) -> None:
        """One launch for each weight. Raises RuntimeError where the kernel does not take the size."""
        stream = torch.cuda.current_stream().cuda_stream
        for a, b, c, d in made.launches():
            status = self._call(
                made.epilogue, a.data_ptr(), b.data_ptr(), c.data_ptr(),
                made.scale.data_ptr(), made.bias.data_ptr(), made.next_scale, d.data_ptr(),
                made.tokens, made.n, made.k, swizzle, self._count,
                self._space.data_ptr(), WORKSPACE, stream,
            )  # fmt: skip
            if status:
                raise RuntimeError(f"status {status}")


def compile_tiles(cutlass: Path, folder: Path, jobs: int) -> tuple[dict[Tile, Path], list[str]]:
    """Libraries by tile, made where a folder has none of this source yet; and what did not compile."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    headers = (cutlass / "include/cutlass/version.h").read_bytes()
    stamp = hashlib.sha256(SOURCE.read_bytes() + FLAGS.encode() + headers).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []

    def one(tile: Tile) -> tuple[Tile, Path | None]:
        path = folder / f"{tile.name.replace(' ', '_')}.{stamp}.so"
        if not path.exists():
            include = [f"-I{cutlass / 'include'}", f"-I{cutlass / 'tools/util/include'}"]
            made = path.with_suffix(f".{os.getpid()}")
            command = [nvcc, *FLAGS.split(), *include, *tile.macros, "-o", str(made), str(SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-300:]]
                failed.append(f"{tile.name}: {lines[0]}")
                return tile, None
            made.rename(path)
        return tile, path

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, TILES))
    return {tile: path for tile, path in found if path}, failed


EPILOGUES = {  # ours: name, template arguments, consecutive columns of a thread
    HALF: ("none_none_fp16", "NONE, NO_RESIDUAL, false", 8),
    CODES: ("none_none_int8", "NONE, NO_RESIDUAL, true", 16),
    GELU: ("gelu_tanh_none_int8", "GELU_TANH, NO_RESIDUAL, true", 16),
    RESIDUAL: ("none_fp16_fp16", "NONE, HALVES, false", 8),
}


class Own:
    """The kernels of the backend `cuda`, compiled by NVRTC."""

    def __init__(self) -> None:
        instances = [
            f"{form}({name}, {flags})"
            for name, flags, _ in EPILOGUES.values()
            for form in ("GEMM", "STATIONARY_GEMM")
        ]
        self._kernels = Kernels([compile_source("gemm", instances)])
        self._count = torch.cuda.get_device_properties(0).multi_processor_count
        self._permuted: dict[int, torch.Tensor] = {}  # weights by their address

    def run(self, tile: OwnTile, made: Operands) -> None:
        """One launch for each weight, with rows permuted as the packer does."""
        name, _, columns = EPILOGUES[made.epilogue]
        if made.weights[0].data_ptr() not in self._permuted:
            order = torch.from_numpy(permute_rows(made.n, columns)).cuda()
            self._permuted = {each.data_ptr(): each[order].contiguous() for each in made.weights}
            self._factor = torch.full((made.n,), made.next_scale, device="cuda")
        for a, b, c, d in made.launches():
            pointers = (made.scale, made.bias, self._factor, c, d)
            call = GemmArguments(*(each.data_ptr() for each in pointers))
            call.m, call.n, call.k = made.tokens, made.n, made.k
            launch_gemm(self._kernels, name, tile, self._count, a, self._permuted[b.data_ptr()], call)


class _Heuristic(ctypes.Structure):  # cublasLtMatmulHeuristicResult_t
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """cuBLASLt's INT8 GEMM with INT32 sums, by its heuristics, with a workspace, without an epilogue."""

    _INT8, _INT32, _COMPUTE, _TRANSPOSED, _WORKSPACE_LIMIT = 3, 10, 72, 3, 1

    def __init__(self) -> None:
        self._library, self._handle = ctypes.CDLL("libcublasLt.so.13"), ctypes.c_void_p()
        self._check("Create", ctypes.byref(self._handle))
        self._space = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

    def _check(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, f"cublasLt{name}")(*arguments):
            raise RuntimeError(f"cublasLt{name} failed with status {status}")

    def algorithms(self, made: Operands, most: int = 8) -> list[_Heuristic]:
        """Return what the heuristics offer for D^T = B . A^T, in columns as cuBLAS counts."""
        pointer, word, by = ctypes.c_void_p, ctypes.c_uint64, ctypes.byref
        self._operation, choice = pointer(), pointer()
        self._check("MatmulDescCreate", by(self._operation), self._COMPUTE, self._INT32)
        transposed = ctypes.c_int32(1)
        self._check("MatmulDescSetAttribute", self._operation, self._TRANSPOSED, by(transposed), word(4))
        sizes = (
            (made.k, made.n, self._INT8),
            (made.k, made.tokens, self._INT8),
            (made.n, made.tokens, self._INT32),
        )
        self._layouts = []
        for rows, columns, kind in sizes:
            layout = pointer()
            self._check("MatrixLayoutCreate", by(layout), kind, word(rows), word(columns), word(rows))
            self._layouts.append(layout)
        self._check("MatmulPreferenceCreate", by(choice))
        limit = word(WORKSPACE)
        self._check("MatmulPreferenceSetAttribute", choice, self._WORKSPACE_LIMIT, by(limit), word(8))
        found, count = (_Heuristic * most)(), ctypes.c_int()
        b, a, d = self._layouts
        ask = (self._handle, self._operation, b, a, d, d, choice, most, found, by(count))
        self._check("MatmulAlgoGetHeuristic", *ask)
        self._sums = [torch.empty(made.tokens, made.n, dtype=torch.int32, device="cuda") for _ in range(3)]
        return found[: count.value]

    def run(self, algorithm: _Heuristic, made: Operands) -> None:
        one, zero, pointer = ctypes.c_int32(1), ctypes.c_int32(0), ctypes.c_void_p
        stream = pointer(torch.cuda.current_stream().cuda_stream)
        b_layout, a_layout, d_layout = self._layouts
        for number, (a, b, _, _) in enumerate(made.launches()):
            d = pointer(self._sums[number % 3].data_ptr())
            self._check(
                "Matmul", self._handle, self._operation, ctypes.byref(one), pointer(b.data_ptr()), b_layout,
                pointer(a.data_ptr()), a_layout, ctypes.byref(zero), d, d_layout, d, d_layout,
                ctypes.byref(algorithm.algorithm), pointer(self._space.data_ptr()),
                ctypes.c_size_t(WORKSPACE), stream,
            )  # fmt: skip

    def wrong(self, made: Operands) -> str:
        a, b, _, _ = list(made.launches())[-1]
        same = torch.equal(self._sums[(len(made.weights) - 1) % 3], torch._int_mm(a, b.t()))
        return "" if same else "sums differ from PyTorch's"


def torch_int8(made: Operands) -> None:
    """INT8 of PyTorch: INT32 sums alone, so the cost of an epilogue comes on top."""
    for a, b, _, _ in made.launches():
        torch._int_mm(a, b.t())


class TorchFp16:
    """cuBLASLt's FP16 GEMM with the bias in its epilogue, and GELU where the linear has one."""

    def __init__(self, made: Operands) -> None:
        self._inputs = [(a.half() / 25) for a in made.inputs]
        self._weights = [(b.half() / 25 / made.k**0.5).contiguous() for b in made.weights]
        self._bias, self._gelu = made.bias.half(), made.epilogue == GELU

    def run(self) -> None:
        for number, weight in enumerate(self._weights):
            x = self._inputs[number % 3]
            if self._gelu:
                torch._addmm_activation(self._bias, x, weight.t(), use_gelu=True)
            else:
                torch.addmm(self._bias, x, weight.t())
