"""Run by `torchrun` in test_training: the same job on every process."""

import os
import sys
from pathlib import Path

import tiny_training as tiny
import torch

from qdqbench.quantize.training.loop import new_accelerator, train

folder = Path(sys.argv[1])
accelerator = new_accelerator("fp32")
job = tiny.job(folder / "checkpoints")
train(job, accelerator)
torch.save(tiny.weights(job), folder / f"weights-{accelerator.process_index}.pt")
torch.distributed.destroy_process_group()
os._exit(0)  # as the installed command ends: threads of libraries may abort a slower end
