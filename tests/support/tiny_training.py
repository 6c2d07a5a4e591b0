"""A training job small enough for unit tests: bags of words, of which one word decides the label."""

from pathlib import Path

import numpy as np
import torch

from qdqbench.quantize.recipe.sections import Training
from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.training.loop import HeldOut, Job, divide, group_decayed

WORDS, ROWS = 20, 90


class Bag(torch.nn.Module):
    """Mean of word vectors, dropout, two classes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.words = torch.nn.Embedding(WORDS, 8)
            self.classes = torch.nn.Linear(8, 2)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, input_ids, attention_mask, token_type_ids):
        weight = attention_mask / attention_mask.sum(dim=1, keepdim=True)
        return self.classes(self.dropout((self.words(input_ids) * weight[..., None]).sum(dim=1)))


def sentences() -> Encoded:
    generator = np.random.default_rng(0)
    ids = [generator.integers(2, WORDS, size=generator.integers(3, 9)) for _ in range(ROWS)]
    labels = np.arange(ROWS) % 2
    for row, label in zip(ids, labels, strict=True):
        row[0] = label
    return Encoded(ids, [np.zeros_like(row) for row in ids], labels, 0)


def job(folder: Path, *, dropout: float = 0.0, collapsed=lambda step: False, **settings) -> Job:
    """Classification by cross entropy; `collapsed` is asked with the number of the evaluation."""
    given = {"epochs": 3, "batch_size": 16, "num_evals": 4, "learning_rate": 0.05, "warmup_ratio": 0.0}
    training = Training(**(given | settings))
    data = divide(sentences(), 0, training.holdout, training.seed)
    model, labels, judged = Bag(dropout), torch.from_numpy(data.encoded.labels), []

    def cross_entropy(wrapped, rows, batch):
        targets = labels[torch.from_numpy(rows)]
        return torch.nn.functional.cross_entropy(wrapped(**batch), targets, reduction="sum")

    def judge(plain):
        judged.append(len(judged))
        _, batch = data.batch(data.held_out)
        with torch.inference_mode():
            logits = plain(**{name: torch.from_numpy(array) for name, array in batch.items()})
        found = float(torch.nn.functional.cross_entropy(logits, labels[torch.from_numpy(data.held_out)]))
        return HeldOut(-found, {"loss": found}, collapsed(judged[-1]))

    return Job(
        model=model,
        data=data,
        settings=training,
        loss=cross_entropy,
        judge=judge,
        folder=folder,
        identity={"model": "bag", **training.model_dump(mode="json")},
        groups=group_decayed(model, training.weight_decay),
    )


def weights(job: Job) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in job.model.parameters()])
