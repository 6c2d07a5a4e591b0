"""Answers of FP32 and of the stage nearest to deployment to the same samples."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qdqbench.eval.accuracy.changes import Answered, answered
from qdqbench.eval.accuracy.logits import read_logits
from qdqbench.quantize.core.arrays import Float64, Floats
from qdqbench.quantize.encoders.load import class_names
from qdqbench.quantize.kinds.tokens import is_named
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task


@dataclass(frozen=True)
class Beside:
    """Both on the first evaluation split."""

    task: Task
    stage: str
    split: str
    fp32: Floats  # answers [answers, width]
    made: Floats  # the same of `stage`
    gold: metrics.Gold
    names: list[str]  # of the classes

    @classmethod
    def of(cls, session: Session, stage: str) -> "Beside":
        """What a run left; its stage was evaluated."""
        task, folder = session.config.task, session.folder / "logits"
        before, after = (read_logits(folder / f"{name}.npz") for name in ("fp32", stage))
        split = next(iter(before))
        gold = metrics.against(task, session.gold[split], before[split])
        return cls(task, stage, split, before[split], after[split], gold, _names(session, split))

    @cached_property
    def of_fp32(self) -> Answered:
        """What FP32 said."""
        return answered(self.task, self.fp32, self.gold, self.names)

    @cached_property
    def of_stage(self) -> Answered:
        """What the stage said."""
        return answered(self.task, self.made, self.gold, self.names)

    @cached_property
    def distance(self) -> Float64:
        """The kind's divergence of both answers to each sample, [samples]."""
        both = self.fp32.astype(np.float64), self.made.astype(np.float64)
        return np.asarray(self.task.kind.divergence(*both, self.gold), dtype=np.float64)


def _names(session: Session, split: str) -> list[str]:
    """Names of the classes: the model's, or those of the labels where it only numbers them."""
    task, dataset = session.config.task, session.eval_splits[split][0].dataset
    names = list(task.classes) or class_names(session.model_name, session.config.revision, task.kind)
    feature = dataset.features.get(task.label_column)
    known = [*task.values] or list(getattr(feature, "names", None) or ())
    return known if len(known) == len(names) and not is_named(tuple(names)) else names
