"""What multiplies matrices here: CUTLASS kernels of gemm.cu, the Triton kernel, and what PyTorch has."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

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
