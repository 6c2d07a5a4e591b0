"""What a training knows of itself between evaluations, and what ends it."""

import math
from dataclasses import dataclass, field
from typing import Any

from qdqbench.quantize.core.errors import CheckFailed
from qdqbench.quantize.recipe.training import Training

MOST_DIVERGED = 2  # evaluations in a row
FURTHER = 10  # times the distance before training


@dataclass(frozen=True)
class HeldOut:
    """An evaluation on the held-out rows."""

    score: float  # higher is better; chooses the weights that are kept
    values: dict[str, float]  # by name, for the log
    collapsed: bool  # the answers no longer depend on the input


@dataclass
class State:
    """What a checkpoint holds beside model, optimizer and scheduler."""

    step: int = 0
    first_score: float | None = None
    best_step: int = -1
    best_score: float = -math.inf
    last_score: float = -math.inf
    without_gain: int = 0  # evaluations
    collapsed: int = 0  # evaluations in a row
    far: int = 0  # likewise
    seconds: float = 0.0
    samples: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)

    def see(self, judged: HeldOut, *, may_collapse: bool, far: float) -> None:
        """Count an evaluation.

        Args:
            judged: after the current step.
            may_collapse: whether answers that do not depend on the input count.
            far: distance (minus the score) that is no divergence yet, whatever the first one was.
        """
        if self.first_score is None:
            self.first_score = judged.score
        self.last_score = judged.score
        gained = judged.score > self.best_score
        if gained:
            self.best_step, self.best_score = self.step, judged.score
        self.without_gain = 0 if gained else self.without_gain + 1
        self.collapsed = self.collapsed + 1 if judged.collapsed and may_collapse else 0
        self.far = self.far + 1 if -judged.score > max(-FURTHER * self.first_score, far) else 0

    def ends(self, settings: Training) -> str | None:
        """Why the run ends here, if it does.

        Raises:
            CheckFailed: it diverged.
        """
        advice = f"lower learning_rate (now {settings.learning_rate:g}) or raise warmup"
        if self.collapsed >= MOST_DIVERGED:
            raise CheckFailed(
                f"training diverged: after step {self.step} the model gives the same answer whatever the "
                f"input, for {self.collapsed} evaluations in a row; {advice}"
            )
        if self.far >= MOST_DIVERGED and self.first_score is not None:
            raise CheckFailed(
                "training diverged: the distance from the FP32 model on the held-out rows grew from "
                f"{-self.first_score:.3g} to {-self.last_score:.3g} after step {self.step}; {advice}"
            )
        if settings.patience is not None and self.without_gain >= settings.patience:
            return f"no gain in {self.without_gain} evaluations"
        return None
