"""The store of trials: one JSON line each, resumed where model, data, recipe and code are the same."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from zipfile import BadZipFile

import numpy as np

from qdqbench.eval.metrics.compare import compare, measure_powers
from qdqbench.eval.metrics.results import Comparison
from qdqbench.eval.metrics.runners import placed, predict, torch_runner
from qdqbench.eval.selection.trials.results import DRAW, CalibrationCost, Scores, Trial, failure_of
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import Recipe, dump_short_recipe, parse_recipe
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import complete_samples, load_split, note_all
from qdqbench.quantize.tasks.data.splits import Split, source_fingerprint
from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Float32
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.system.environment import describe_environment, get_code_identity, now

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def draw_samples(session: Session, samples: int, *, least: int = 2) -> tuple[Split, Encoded]:
    """Draw the rows of the calibration split after those that calibrate, in the same seeded order.

    Args:
        least: rows without which nothing can be said, unless fewer were asked for.
    """
    settings, task = session.recipe.calibration, session.config.task
    if settings.split in task.eval_splits:
        raise UserError(
            f"calibration.split is {settings.split!r}, the judge of task {task.name!r}; what is chosen is "
            f"measured on rows next to the calibration data, so set calibration.split to {task.train_split}"
        )
    wanted = settings.samples + samples
    split = load_split(task, session.data_source, settings.split, limit=wanted, seed=settings.seed)
    known = [note_all(settings.split, split.rows, wanted), *session.notes]
    session.notes += [note for note in split.notes if note not in known]
    session.warnings += [line for line in split.warnings if line not in session.warnings]
    taken = complete_samples(split.dataset, task, settings.samples)
    left = len(split.dataset) - taken
    if left < min(samples, least):
        raise UserError(
            f"split {settings.split!r} of {split.source} has {split.rows} rows and calibration takes "
            f"{taken}, so {max(left, 0)} are left to measure on; lower calibration.samples in the recipe"
        )
    if left < samples:
        session.notes.append(
            f"measured on {left} samples, not {samples}: split {settings.split!r} has {split.rows} rows, and "
            f"calibration takes {taken}"
        )
    split = replace(split, dataset=split.dataset.select(range(taken, len(split.dataset))))
    encoded = encode(split, task, session.tokenizer, session.recipe.export.max_length)
    if encoded.truncated:
        session.notes.append(f"{encoded.truncated} samples were cut to export.max_length")
    return split, encoded


def describe_session(session: Session) -> dict[str, Any]:
    return {
        "created": now(),
        "command": session.config.command,
        "metric": session.config.task.metrics[0],
        "warnings": session.warnings,
        "notes": session.notes,
        "environment": describe_environment(),
    }


Record = TypeVar("Record", bound=Trial)
Calibrate = Callable[[], tuple["PreTrainedModel", CalibrationCost]]  # a fake-quant model
TRIALS = "trials.jsonl"
RECIPE_FILE = "recipe.yaml"  # the recipe that a command chose


def hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def named_by(name: str, command: str) -> str:
    """Return the name of a recipe that a command made from the one with this name."""
    return f"{name.removesuffix(f'-{command}')}-{command}"


def write_recipe(recipe: Recipe, folder: Path) -> None:
    text = dump_short_recipe(recipe)
    assert parse_recipe(text, RECIPE_FILE) == recipe, text
    files.write_text(folder / RECIPE_FILE, text)


def require_same(what: str, made: Mapping[str, Any], settings: Mapping[str, Any], advice: str) -> None:
    if differing := [key for key in {*made, *settings} if made.get(key) != settings.get(key)]:
        raise UserError(
            f"{what} was made with other settings ({', '.join(sorted(differing))}); give {advice}, or "
            "another --out"
        )


class Store(Generic[Record]):
    """A file of trials by key, appended to as they finish.

    The first line holds everything that the others depend on; other settings start a new file. A last line
    that a kill tore is dropped.
    """

    def __init__(
        self, path: Path, schema: type[Record], settings: Mapping[str, Any], *, keeps: bool = False
    ) -> None:
        """Open or start a file; one that `keeps` its trials refuses other settings."""
        self.path, self.schema = path, schema
        header = {"settings": json.loads(json.dumps(settings))}
        first, self.trials = self._read()
        self.is_stale = bool(first) and first != header  # what was there is lost
        if self.is_stale:
            if keeps:
                require_same(str(path), first["settings"], header["settings"], "--overwrite")
            self.trials = {}
        self.resumed = len(self.trials)
        lines = [header, *(self._line(key, trial) for key, trial in self.trials.items())]
        files.write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))

    def add(self, key: str, trial: Record) -> Record:
        """Append a trial; it is on the disk when this returns."""
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(self._line(key, trial), allow_nan=False) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise files.cannot_write(self.path, error) from error
        self.trials[key] = trial
        self._mark.unlink(missing_ok=True)  # of a process that died, in another trial too
        return trial

    @contextlib.contextmanager
    def attempt(self, key: str) -> Iterator[int]:
        """Run a trial; yield how often its process died in it before."""
        mark = self._mark
        deaths = files.read_json(mark).get(key, 0) if mark.is_file() else 0
        files.write_json(mark, {key: deaths + 1})
        try:
            yield deaths
        finally:
            mark.unlink(missing_ok=True)

    @property
    def _mark(self) -> Path:
        """The trial that runs: left behind by a process that dies."""
        return self.path.with_suffix(".running.json")

    @property
    def seconds(self) -> float:
        return float(sum(trial.seconds for trial in self.trials.values()))

    @property
    def resume_note(self) -> str | None:
        if self.is_stale:
            return f"{self.path}: from other settings, data or code; starting from scratch"
        return f"{self.path}: resuming after {self.resumed} finished trials" if self.resumed else None

    @staticmethod
    def _line(key: str, trial: Record) -> dict[str, Any]:
        return {"key": key, "trial": trial.model_dump(mode="json")}

    def _read(self) -> tuple[dict[str, Any], dict[str, Record]]:
        """Return the header and the trials up to the first line that is not one."""
        header: dict[str, Any] = {}
        trials: dict[str, Record] = {}
        known = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        for text in known.splitlines(keepends=True):
            try:
                line = json.loads(text)
                if not text.endswith("\n"):
                    break
                if header:
                    trials[line["key"]] = self.schema.model_validate(line["trial"])
                else:
                    header = {"settings": line["settings"]}
            except (ValueError, TypeError, KeyError):
                break
        return header, trials


@dataclass
class Trials:
    """Recipes that are tried on one model and task, compared with FP32 on the draw and evaluation data."""

    session: Session
    samples: int  # of the draw, at most; 0: no draw
    path: Path
    evaluates: bool = True  # False: evaluation data are not read
    least: int = 2  # samples of the draw
    reference: Callable[[], dict[str, Float32]] | None = None  # FP32's answers; None: of the session's model

    @cached_property
    def drawn(self) -> tuple[Split, Encoded]:
        return draw_samples(self.session, self.samples, least=self.least)

    @property
    def draw(self) -> Encoded:
        return self.drawn[1]

    def describe(self) -> dict[str, Any]:
        """Return the fields of a `DrawRecord`: what was measured, on what, where and when."""
        session, config, settings = self.session, self.session.config, self.session.recipe.calibration
        split = self.drawn[0]
        return describe_session(session) | {
            "recipe": config.recipe.model_dump(mode="json"),
            "model": {"name": session.model_name, "sha256": session.model_sha256},
            "task": config.task.model_dump(mode="json"),
            "data": {
                "source": split.source,
                "fingerprint": split.fingerprint,
                "split": settings.split,
                "rows": split.rows,
                "calibration": settings.samples,
                "samples": len(self.draw.gold),
                "seed": settings.seed,
            },
            "seed": config.seed,
            "batch_size": config.batch_size,
        }

    @cached_property
    def encoded(self) -> dict[str, Encoded]:
        splits = self.session.eval_splits if self.evaluates else {}
        draw = {DRAW: self.draw} if self.samples else {}
        return draw | {name: encoded for name, (_, encoded) in splits.items()}

    @property
    def rows(self) -> int:
        return sum(encoded.rows for encoded in self.encoded.values())

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return everything that a trial depends on but its own recipe, as JSON."""
        session, config = self.session, self.session.config
        splits = session.eval_splits.values() if self.evaluates else ()
        split = config.recipe.calibration.split
        return {
            "model": session.model_identity,
            "backend": session.target.backend,  # decides what `auto` of the recipe is
            "recipe": config.recipe.model_dump(mode="json", exclude={"name", "description", "gate"}),
            "task": config.task.model_dump(mode="json"),
            "data": [
                source_fingerprint(config.task, session.data_source, split),
                *([self.drawn[0].fingerprint] if self.samples else []),  # loaded before a folder is made
                *(split.fingerprint for split, _ in splits),
            ],
            "samples": self.samples,
            **config.model_dump(mode="json", include={"limit", "batch_size", "seed"}),
            **get_code_identity(),
        }

    @cached_property
    def store(self) -> Store[Trial]:
        return Store(self.path, Trial, self.settings)

    @cached_property
    def fp32(self) -> dict[str, Float32]:
        """Return FP32's answers [answers, width] by split; kept in a file alongside the store."""
        path, identity = self.path.with_suffix(".fp32.npz"), hash_of(self.settings)
        damaged = contextlib.suppress(OSError, ValueError, KeyError, BadZipFile)  # or missing
        with damaged, np.load(path, allow_pickle=False) as arrays:
            if str(arrays["identity"]) == identity:
                return {split: arrays[f"answers {split}"] for split in self.encoded}
        try:
            model = self.session.fp32_model
            answers = self.reference() if self.reference else self.answer(placed(model), "FP32")
        except CheckFailed as error:
            raise UserError(
                f"model {self.session.model_name} gives NaN or infinite logits in FP32, so there is nothing "
                "to compare with; train or save it again"
            ) from error
        arrays = {f"answers {split}": each for split, each in answers.items()}
        with files.atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, identity=np.array(identity), **arrays)
        return answers

    def fp32_scores(self, split: str) -> Scores:
        task, answers = self.session.config.task, self.fp32[split]
        gold = metrics.select_reference(task, self.encoded[split].gold, answers)
        return Scores(
            metrics=metrics.compute(task, answers, gold),
            stderr=metrics.stderr(task, answers, gold, seed=self.session.config.seed),
            n=len(gold),
        )

    def answer(self, model: "PreTrainedModel", text: str) -> dict[str, Float32]:
        """Return a model's answers [answers, width] by split."""
        session = self.session
        return {
            split: predict(
                torch_runner(model),
                encoded,
                pad_id=session.pad_id,
                batch_size=session.config.batch_size,
                stage=text,
            )
            for split, encoded in self.encoded.items()
        }

    def compare(self, answers: Mapping[str, Float32]) -> dict[str, Comparison]:
        """Compare answers [answers, width] by split with FP32's."""
        task, seed = self.session.config.task, self.session.config.seed
        return {
            split: compare(task, self.fp32[split], each, self.encoded[split].gold, seed=seed)
            for split, each in answers.items()
        }

    def measure(self, key: str, draft: Trial, calibrate: Calibrate) -> Trial:
        """Return a finished trial, or calibrate and score it now.

        Failures become part of the trial; one that the user can fix is tried again by the next call.
        """
        if key in self.store.trials:
            return self.store.trials[key]
        trial = self.attempt(draft, calibrate)
        if trial.failure and trial.failure.is_retryable:
            return trial
        return self.store.add(key, trial)

    def attempt(self, draft: Trial, calibrate: Calibrate) -> Trial:
        """Return a trial that is calibrated and scored now, and not kept."""
        self.fp32  # noqa: B018  (its seconds are not those of a trial)
        start, trial = time.perf_counter(), draft.model_copy()
        text = draft.recipe.calibration.method if draft.recipe else ""
        try:
            model, trial.calibration = calibrate()
            answers = self.answer(model, text)
            trial.scores = self.compare(answers)
            if DRAW in answers:
                pair = self.fp32[DRAW], answers[DRAW]
                powers = measure_powers(self.session.config.task.kind, *pair, self.draw.gold)
                trial.noise_powers = powers.noise.tolist()
        except (UserError, CheckFailed) as error:
            trial.failure = failure_of(error)
        trial.seconds = time.perf_counter() - start
        return trial
