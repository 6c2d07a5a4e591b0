"""A run's questions to an engine that trtexec runs: asked into files first, answered from files later.

Both are what a runner is: callable on one batch. What asks must ask the same in the same order both times.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qdqbench.quantize.core.arrays import Array, Float32, Int64
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.engine.profiles import LENGTH_STEP, Profile, choose_profile
from qdqbench.quantize.kinds.kind import joined
from qdqbench.quantize.runtime.feeds import fitted
from qdqbench.quantize.trtexec.plan import MAX_CASES, Case, Feeds, Plan, digest
from qdqbench.quantize.trtexec.read import read_outputs


class Recorder:
    """Keeps the inputs that an engine would get, and answers with zeros [B, (L,) width]."""

    def __init__(
        self, profiles: Sequence[Profile], inputs: Sequence[str], pad_id: int, width: int, *, by_token: bool
    ) -> None:
        self._profiles, self._inputs, self._pad_id = profiles, inputs, pad_id
        self._width, self._by_token = width, by_token
        self.cases: dict[str, Case] = {}
        self.feeds: dict[str, Feeds] = {}
        self._seen: set[str] = set()

    def __call__(self, batch: Mapping[str, Int64]) -> Float32:
        """Record one batch.

        Raises:
            CheckFailed: it is larger than every profile.
            UserError: there are too many.
        """
        feeds = fitted(batch, self._profiles, self._inputs, self._pad_id, LENGTH_STEP)
        rows, length = next(iter(batch.values())).shape
        case = case_of(feeds, self._profiles)
        if case.sha256 not in self._seen:
            if len(self.cases) == MAX_CASES:
                raise UserError(f"more than {MAX_CASES} batches to answer; start the run with --limit")
            name = f"{len(self.cases):04}"
            self._seen.add(case.sha256)
            self.cases[name], self.feeds[name] = case, feeds
        return np.zeros((rows, length, self._width) if self._by_token else (rows, self._width), np.float32)


class Replay:
    """Answers from files of `trtexec --exportOutput`.

    Args:
        folder: of the plan.
        outputs: of the graph, as the kind of task says; several are joined into one.
    """

    def __init__(self, folder: Path, plan: Plan, pad_id: int, outputs: Sequence[str]) -> None:
        self._folder, self._plan, self._pad_id, self._outputs = folder, plan, pad_id, outputs
        self._names = {case.sha256: name for name, case in plan.answers.items()}

    def __call__(self, batch: Mapping[str, Int64]) -> Float32:
        """The answers to one batch.

        Raises:
            UserError: it was not asked, or its file is not what trtexec writes of these outputs.
            CheckFailed: it is larger than every profile.
        """
        feeds = fitted(batch, self._plan.profiles, list(self._plan.inputs), self._pad_id, LENGTH_STEP)
        name = self._names.get(digest(feeds))
        if name is None:
            raise UserError(
                f"trtexec was not asked in {self._folder} what this run asks now, because its data or shapes "
                f"changed; run `qdqbench build {self._folder.parent} --print-trtexec` again"
            )
        path = self._folder / "output" / f"{name}.json"
        made = read_outputs(path)
        if lost := [output for output in self._outputs if output not in made]:
            raise UserError(f"{path} has no output {', '.join(lost)} but {', '.join(made)[:200]}")
        answers: Array = np.asarray(joined(made, self._outputs), np.float32)
        rows, size = len(next(iter(batch.values()))), next(iter(feeds.values())).shape
        if answers.ndim < 2 or len(answers) != size[0] or (answers.ndim == 3 and answers.shape[1] != size[1]):
            raise UserError(f"{path} has answers of shape {answers.shape} to inputs of {size}; run it again")
        return np.asarray(answers[:rows])


def missing(folder: Path, plan: Plan) -> list[str]:
    """Answers that trtexec has not given yet, by name."""
    return [name for name in plan.answers if not (folder / "output" / f"{name}.json").is_file()]


def case_of(feeds: Feeds, profiles: Sequence[Profile]) -> Case:
    """What an inference is; errors are those of `choose_profile`."""
    batch, length = next(iter(feeds.values())).shape
    profile = choose_profile(profiles, batch, length)
    return Case(profile=profile, batch=batch, length=length, sha256=digest(feeds))
