"""A plain Triton INT8 GEMM with the epilogues of gemm.cu: what needs neither CUTLASS nor nvcc."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages)
CONFIGS = [(128, 128, 128, 8, 4), (128, 256, 128, 8, 3), (64, 128, 128, 4, 4), (64, 64, 128, 4, 5)]


@triton.jit
def _kernel(  # noqa: PLR0917
    a, b, c, scale, bias, d, next_scale, M, N, K,
    EPILOGUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    # rows of blocks in groups, so that a wave shares its operands in L2
    pid, columns = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    rows = tl.cdiv(M, BLOCK_M)
    first = pid // (GROUP * columns) * GROUP
    size = tl.minimum(rows - first, GROUP)
    row, column = first + pid % (GROUP * columns) % size, pid % (GROUP * columns) // size
    m, n, k = (
        row * BLOCK_M + tl.arange(0, BLOCK_M),
        column * BLOCK_N + tl.arange(0, BLOCK_N),
        tl.arange(0, BLOCK_K),
    )
    a += m[:, None] * K + k[None, :]
    b += n[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for _ in range(0, K, BLOCK_K):  # every M, N and K of the models is a multiple of the blocks
        total = tl.dot(tl.load(a), tl.load(b), total, out_dtype=tl.int32)
        a += BLOCK_K
        b += BLOCK_K
    x = total.to(tl.float32) * tl.load(scale + n)[None, :] + tl.load(bias + n)[None, :]
    place = m[:, None] * N + n[None, :]
    if EPILOGUE == 2:
        x = x * tl.sigmoid(x * (1.5957691216 + 0.0713548162726 * x * x)) * next_scale
    if EPILOGUE == 3:
        x += tl.load(c + place).to(tl.float32)
    if EPILOGUE == 1 or EPILOGUE == 2:  # noqa: PLR1714  Triton knows no sets
        x = libdevice.rint(tl.minimum(tl.maximum(x, -128.0), 127.0))
    tl.store(d + place, x.to(d.dtype.element_ty))


def launch(config, epilogue, a, b, c, scale, bias, next_scale, d) -> None:  # noqa: PLR0917
    """`d` = epilogue(a . b^T): int8 [M, K], int8 [N, K]; see gemm.cu."""
    block_m, block_n, block_k, warps, stages = config
    (m, k), n = a.shape, b.shape[0]
    _kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        a, b, c, scale, bias, d, next_scale, m, n, k,
        EPILOGUE=epilogue, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=8,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
