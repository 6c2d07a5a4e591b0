"""What a training begins with: a base encoder and its data."""

from qdqbench.quantize.encoders.load import load_config, tokenizer_of
from qdqbench.quantize.families.known import family_of
from qdqbench.quantize.tasks.sources import read_split
from qdqbench.quantize.tasks.task import Task


def require_base(base: str, revision: str | None, task: Task, data: str) -> None:
    """Find out what is wrong with a base or its data before anything is written.

    Raises:
        UserError: they cannot be read.
    """
    family_of(load_config(base, revision))
    tokenizer_of(base, revision, task.kind)
    for split in (task.train_split, *task.eval_splits):
        read_split(task, data, split)
