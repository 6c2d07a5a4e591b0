"""Train one quantized model with the trainers of other tools: SQNR, metric, seconds and peak memory.

    python -m tools.measure_training int8-attention --model minilm-l6-mrpc --task mrpc --data glue --out FILE

All but NNCF start with the quantizers and scales of the recipe, and see as many batches of the train split
as `reconstruction` takes steps. `modelopt-qat` and `modelopt-qad` are NVIDIA ModelOpt's trainers on top of
the Hugging Face Trainer, the first with labels, the second with the FP32 model as teacher. NNCF places
quantizers itself: `nncf-ptq` as it calibrates, `nncf-qat` trained with labels. Those from `without-weight` on
reconstruct with these in FP32, of which `without-ffn-out` is the input of the second feed-forward linear:
what rounding them costs, no training of the others wins back. Judged is the validation split: SQNR against
FP32, and the first metric of the task.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, set_seed

from qdqbench.eval.metrics.compare import measure_powers
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.calibration.fakequant.quantizers import forward, get_quantizer_kind, list_quantizers
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import adapt_recipe, find_recipe
from qdqbench.quantize.recipe.sections import Reconstruction
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.data.encode import encode, iter_encoded
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.training import loop
from qdqbench.quantize.training.reconstruct import read_rows, reconstruct
from qdqbench.quantize.training.student import to_db
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.system.environment import describe_environment

Rows = list[dict[str, Any]]
ACTIVATIONS = ("ffn-out", "input", "residual", "query", "key", "value", "softmax")  # quantizers
CALIBRATED = 300  # samples that NNCF calibrates with, its own default


class Given:
    """A model, its calibrated form, and the rows that judge both."""

    def __init__(self, session: Session, device: str) -> None:
        self.session, self.device, self.task = session, device, session.config.task
        self.teacher = session.new_model().to(device)
        twin = session.new_int8_model().to(device)
        settings = session.calibration
        self.record = ptq.calibrate(twin, session.plan, session.calibration_batches(), settings)
        self.accelerator = loop.new_accelerator("fp32")
        self.judged = next(iter(session.eval_splits.values()))[1]
        self.wanted = self.answer(self.teacher)

    def new(self) -> Any:
        """Return the PTQ model again, of ModelOpt's modules, with gradients."""
        model: Any = self.session.new_int8_model().to(self.device)
        ptq.restore(model, self.session.plan, self.record)
        return model

    def rows(self) -> Rows:
        """Return the tokenized train split as a Trainer takes it."""
        session, longest = self.session, self.session.recipe.export.max_length
        split = session.split(self.task.train_split, limit=None)
        encoded = encode(split, self.task, session.tokenizer, longest)
        samples = iter_encoded(split, self.task, session.tokenizer, longest)
        return [
            {"input_ids": ids.tolist(), "token_type_ids": types.tolist(), "labels": label}
            for (_, ids, types, *_), label in zip(samples, encoded.labels.tolist(), strict=True)
        ]

    def answer(self, model: Any) -> Any:
        model.eval()
        return loop.predict_rows(self.accelerator, model, self.task.kind, self.judged, self.session.pad_id)

    def judge(self, model: Any) -> dict[str, float]:
        answers, gold = self.answer(model), self.judged.gold
        noise = measure_powers(self.task.kind, self.wanted, answers, gold).noise.mean()
        name = self.task.metrics[0]
        return {"sqnr_db": to_db(float(noise)), name: metrics.compute(self.task, answers, gold)[name]}


def train(given: Given, model: Any, rate: float, steps: int, kind: Any = Trainer, **options: Any) -> Any:
    """Train with a Trainer of transformers, or one made from it, for some steps of 32 rows."""
    with tempfile.TemporaryDirectory(prefix="qdqbench-trainer-") as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=rate,
            warmup_steps=steps // 10,
            report_to=[], save_strategy="no", use_cpu=given.device == "cpu", disable_tqdm=True, seed=0,
        )  # fmt: skip
        collate = DataCollatorWithPadding(given.session.tokenizer)
        rows = given.rows()
        kind(model=model, args=arguments, train_dataset=rows, data_collator=collate, **options).train()
    return model


def reconstructed(given: Given, rate: float, steps: int, without: Collection[str] = ()) -> Any:
    session, settings, model = given.session, Reconstruction(steps=steps), given.new()
    family = family_of(model.config)
    for name, quantizer in list_quantizers(model).items():
        kind = get_quantizer_kind(name)
        second = kind == "input" and family.has_role(name.rpartition(".")[0], "ffn-out")
        if ("ffn-out" if second else kind) in without:
            quantizer.disable()
    rows, _ = read_rows(session, settings)
    teacher = session.new_model().to(given.device)
    reconstruct(model, teacher, session.plan, given.record, rows, settings)
    return model


def modelopt_qat(given: Given, rate: float, steps: int) -> Any:
    from modelopt.torch.quantization.plugins.transformers_trainer import QATTrainer

    return train(given, given.new(), rate, steps, QATTrainer)


def modelopt_qad(given: Given, rate: float, steps: int) -> Any:
    from modelopt.torch.quantization.plugins.transformers_trainer import QADTrainer

    class Distiller(QADTrainer):  # type: ignore[misc]  (their trainers have no types)
        """Their loss, on all rows: as it comes it shifts logits for language models, and drops the last."""

        def _standard_kd_loss(self, outputs: Any, labels: Any, **_: Any) -> torch.Tensor:
            loss: torch.Tensor = self._kd_criterion(outputs.logits, self._last_teacher_outputs.logits).mean()
            return loss

    return train(given, given.new(), rate, steps, Distiller, distill_args={"teacher_model": given.teacher})


def nncf_ptq(given: Given, rate: float, steps: int) -> Any:
    import nncf

    rows = given.rows()[:CALIBRATED]
    collate = DataCollatorWithPadding(given.session.tokenizer)
    batches = [collate([{k: v for k, v in row.items() if k != "labels"}]).to(given.device) for row in rows]
    return nncf.quantize(
        given.session.new_model().to(given.device),
        nncf.Dataset([dict(batch) for batch in batches]),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
    )


def nncf_qat(given: Given, rate: float, steps: int) -> Any:
    return train(given, nncf_ptq(given, rate, steps), rate, steps)


SYSTEMS: dict[str, Callable[[Given, float, int], Any]] = {
    "reconstruction": reconstructed,
    "without-weight": partial(reconstructed, without=("weight",)),
    "without-ffn-out": partial(reconstructed, without=("ffn-out",)),
    "without-attention": partial(reconstructed, without=("query", "key", "value", "softmax")),
    "without-residual": partial(reconstructed, without=("residual",)),
    "without-activations": partial(reconstructed, without=ACTIVATIONS),
    "modelopt-qat": modelopt_qat,
    "modelopt-qad": modelopt_qad,
    "nncf-ptq": nncf_ptq,
    "nncf-qat": nncf_qat,
}


def measure(given: Given, name: str, rate: float, steps: int) -> dict[str, Any]:
    """Train by one system; the seconds include what it does before its first step."""
    set_seed(0)
    cuda = given.device == "cuda"
    if name.startswith("modelopt") and cuda:
        forward(given.new(), next(iter(given.session.calibration_batches())))  # ModelOpt compiles its kernels
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model = SYSTEMS[name](given, rate, steps)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if cuda else None
    found = {"system": name, "learning_rate": rate, "seconds": seconds, "peak_bytes": peak}
    return found | given.judge(model)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a record of all trainings of one recipe, model and task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("recipe")
    for option in ("--model", "--task", "--data", "--out"):
        parser.add_argument(option, required=True)
    parser.add_argument("--backend", default="cuda", help="of the recipe: decides what calibration does")
    parser.add_argument("--no-centering", action="store_true", help="which ModelOpt's trainers cannot keep")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, with commas in between")
    parser.add_argument("--rates", default="1e-6,1e-5", help="learning rates of the trainers")
    parser.add_argument("--steps", type=int, default=Reconstruction().steps)
    asked = parser.parse_args(arguments)
    fields: dict[str, Any] = {"engine.backend": asked.backend}
    fields |= {"calibration.centering": False} if asked.no_centering else {}
    recipe = adapt_recipe(find_recipe(asked.recipe, asked.model), fields=fields)
    task, device = get_task(asked.task), "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(recipe=recipe, model=asked.model, task=task, data=asked.data)
        given = Given(Session(config, Path(folder)), device)
        ptq_model = given.new()
        with native.use_evaluation(ptq_model):
            found = [{"system": "ptq"} | given.judge(ptq_model)]
        about = {"recipe": asked.recipe, "model": Path(asked.model).name, "task": asked.task}
        about |= {"backend": asked.backend, "steps": asked.steps, "n": len(given.judged.gold)}
        about |= {"centering": given.session.calibration.centering is True}
        about |= {"environment": describe_environment()}
        for name in asked.systems.split(","):
            untrained = name.startswith(("reconstruction", "without", "nncf-ptq"))
            rates = "0" if untrained else asked.rates
            for rate in map(float, rates.split(",")):
                found.append(measure(given, name, rate, asked.steps))
                print(found[-1], flush=True)
                files.write_json(Path(asked.out), about | {"trainings": found})


if __name__ == "__main__":
    main()
