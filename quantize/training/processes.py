"""The processes and the arithmetic of a training: Accelerate on what is here, bf16, TF32 or FP32."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.utils.errors import QdqError

if TYPE_CHECKING:
    from accelerate import Accelerator

AMPERE = (8, 0)  # the first with TF32


def resolve_precision(precision: str) -> str:
    """Return the precision of a setting on this machine: `bf16`, `tf32` or `fp32`.

    `auto` is bf16, and `tf32` is TF32, where the GPU has it; else both are FP32. TF32 products have the
    10 bits of mantissa that FP16 has, bf16 has 7: about those of INT8, whose steps QAT is to learn.
    """
    import torch

    cuda = torch.cuda.is_available()
    if precision == "auto":
        return "bf16" if cuda and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if precision == "tf32":
        return "tf32" if cuda and torch.cuda.get_device_capability() >= AMPERE else "fp32"
    return precision


@contextmanager
def use_matmul_precision(precision: str) -> Iterator[None]:
    """Compute FP32 matrix products in TF32, if the setting means that here; as before, afterwards.

    Fused attention is not cuDNN's: at lengths of 64 modulo 128 its gradient is NaN where a mask leaves a row
    nothing (github.com/pytorch/pytorch/issues/196678).
    """
    import torch

    attention: Any = torch.backends.cuda  # whose functions have no types
    before, cudnn = torch.get_float32_matmul_precision(), attention.cudnn_sdp_enabled()
    attention.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high" if resolve_precision(precision) == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        attention.enable_cudnn_sdp(cudnn)


def new_accelerator(precision: str) -> "Accelerator":
    """Create an accelerator for one process, or those that `accelerate launch` or `torchrun` started."""
    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    mixed = "bf16" if resolve_precision(precision) == "bf16" else "no"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed:
        AcceleratorState._reset_state()  # one process may train twice
    return Accelerator(
        mixed_precision=mixed,
        cpu=not torch.cuda.is_available(),  # else several processes without a GPU would not find each other
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            # calibration runs in the main process while the others wait
            InitProcessGroupKwargs(timeout=timedelta(hours=6)),
            # buffers are amax and positions, which are the same everywhere
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )


def count_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def leave_group() -> None:
    """End the group of processes, if there is one; each goes on alone."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def join_group() -> Iterator[None]:
    """End the group of processes with the block.

    Every process raises the same `QdqError`. Any other exception may be one process's alone, for which the
    others would wait in a collective, as ending the group would for them: it ends this process at once, and
    the launcher then stops the others.
    """
    try:
        yield
    except QdqError:
        leave_group()
        raise
    except BaseException as error:
        if count_processes() > 1:
            traceback.print_exc()
            rank, what = os.environ.get("RANK", "0"), " ".join(f"{type(error).__name__}: {error}".split())
            sys.stderr.write(f"qdqbench: process {rank} failed and stops the training, {what[:400]}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        leave_group()
        raise
    leave_group()
