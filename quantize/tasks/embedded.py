"""The default that needs no model and no download: a generated sentence task and a small trained BERT."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.kinds.encoded import Encoded, IndexedBatch, pad
from qdqbench.quantize.tasks.task import EMBEDDED
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    from transformers import BertForSequenceClassification, BertTokenizer

SENTIMENTS = ("negative", "positive")
LABEL_NOISE = 0.02  # labels turned around, so that no model is right everywhere
MAX_WORDS = 30
POLAR = (
    [
        "bad", "dull", "awful", "boring", "clumsy", "cold", "bleak", "tedious", "stale", "terrible", "harsh",
        "bland", "sad", "ugly", "dreary", "awkward",
    ],
    [
        "good", "great", "lovely", "charming", "clever", "warm", "bright", "fun", "fresh", "fine", "calm",
        "tasty", "superb", "elegant", "lively", "witty",
    ],
)  # fmt: skip
NEGATIONS = ["not", "never", "hardly", "barely"]
DEGREES = ["very", "quite", "rather", "really", "truly", "so"]
SUBJECTS = [
    "film", "meal", "room", "story", "actor", "song", "play", "garden", "hotel", "book", "trip", "cook",
    "guide", "singer", "plot", "coffee", "crew", "host", "tour",
]  # fmt: skip
VERBS = ["was", "seemed", "looked", "felt", "remained"]
PLACES = [
    "on friday", "in the old town", "by the river", "after the rain", "for the guests",
    "during the long winter", "at the end of the day", "near the station",
]  # fmt: skip
ASIDES = [
    "we arrived late", "the door was blue", "it was a tuesday", "the tickets came by mail",
    "my brother drove us there", "they counted forty chairs",
]  # fmt: skip


def sentences(rows: int, *, seed: int) -> list[tuple[str, int]]:
    """Draw different sentences of 4 to 30 words with their class (0 or 1; `LABEL_NOISE` are wrong)."""
    generator = np.random.default_rng(seed)
    labels: dict[str, int] = {}
    while len(labels) < rows:
        words, label = _sentence(generator)
        text = " ".join(words)
        if len(words) <= MAX_WORDS and text not in labels:
            labels[text] = label ^ int(generator.random() < LABEL_NOISE)
    return list(labels.items())


def _pick(generator: np.random.Generator, words: list[str]) -> list[str]:
    return words[generator.integers(len(words))].split()


def _sentence(generator: np.random.Generator) -> tuple[list[str], int]:
    words, label = _clause(generator)
    kind = generator.choice(["one", "but", "although first", "although last"], p=[0.54, 0.36, 0.05, 0.05])
    if kind != "one":
        other, other_label = _clause(generator)
        if kind == "but":
            words, label = [*words, "but", *other], other_label
        elif kind == "although first":
            words, label = ["although", *words, ",", *other], other_label
        else:
            words = [*words, ",", "although", *other]
    aside = generator.random()
    if aside < 0.1:
        words = [*_pick(generator, ASIDES), "and", *words]
    elif aside < 0.2:
        words = [*words, ",", "and", *_pick(generator, ASIDES)]
    return words, label


def _clause(generator: np.random.Generator) -> tuple[list[str], int]:
    """Draw subject, verb and adjective, with the polarity 0 or 1."""
    polarity, negated = (int(value) for value in generator.integers(2, size=2))
    words = ["the", *_pick(generator, SUBJECTS)]
    if generator.random() < 0.2:
        words += _pick(generator, PLACES)
    words += _pick(generator, VERBS)
    if negated:
        words += _pick(generator, NEGATIONS)
    if generator.random() < 0.3:
        words += _pick(generator, DEGREES)
    rarity = 1 / np.arange(1, len(POLAR[0]) + 1) ** 0.7  # rare adjectives are the hard cases
    words.append(POLAR[polarity][generator.choice(len(rarity), p=rarity / rarity.sum())])
    if generator.random() < 0.2:
        words += _pick(generator, PLACES)
    return words, polarity ^ negated


VERSION = 1  # of the words, the grammar and the training; a folder written by another one is made again
MAX_LENGTH = 128


@dataclass(frozen=True)
class Size:
    train_rows: int = 8000
    validation_rows: int = 1000
    layers: int = 2
    hidden: int = 64
    head_size: int = 16  # INT8 attention needs 16, 32 or 64
    steps: int = 900
    batch_size: int = 48


@dataclass(frozen=True)
class EmbeddedRun:
    model_dir: Path
    data_dir: Path  # of the task `EMBEDDED`


def write_embedded(folder: Path, *, seed: int = 0, size: Size | None = None) -> EmbeddedRun:
    """Generate the data and train the model, unless `folder` holds those of the same seed and size.

    Training runs on one thread: matrices this small gain nothing from a second one, and the weights then do
    not depend on the number of threads.

    Args:
        folder: Gets `data/embedded/{train,validation}.parquet`, `model/` and `embedded.json`.
    """
    size = size or Size()
    run = EmbeddedRun(folder / "model", folder / "data")
    settings = {"version": VERSION, "seed": seed, **asdict(size)}
    marker = folder / "embedded.json"
    if marker.is_file():
        if files.read_json(marker) == settings:
            return run
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} holds something else than the built-in BERT; give another folder")
    with files.atomic_folder(folder) as temporary:
        _write_data(temporary / "data" / EMBEDDED.name, seed, size)
        with quiet("transformers"):
            tokenizer = _tokenizer()
            model = _train(temporary / "data", tokenizer, seed, size)
            model.save_pretrained(temporary / "model")
            tokenizer.save_pretrained(temporary / "model")
        files.write_json(temporary / marker.name, settings)
    return run


def _write_data(folder: Path, seed: int, size: Size) -> None:
    import datasets

    rows = sentences(size.train_rows + size.validation_rows, seed=seed)
    splits = {"train": rows[: size.train_rows], "validation": rows[size.train_rows :]}
    label = datasets.ClassLabel(names=list(SENTIMENTS))
    columns = {"sentence": datasets.Value("string"), "label": label, "idx": datasets.Value("int32")}
    folder.mkdir(parents=True)
    for split, part in splits.items():
        texts, labels = zip(*part, strict=True)
        values = {"sentence": texts, "label": labels, "idx": range(len(part))}
        with quiet("datasets"):
            dataset = datasets.Dataset.from_dict(values, features=datasets.Features(columns))
            dataset.to_parquet(folder / f"{split}.parquet")


def _tokenizer() -> "BertTokenizer":
    """Train a WordPiece tokenizer on the words of the grammar, with letters for anything else."""
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
    groups = [*POLAR, NEGATIONS, DEGREES, SUBJECTS, VERBS, PLACES, ASIDES, ["the but although and ,"]]
    words = {word for group in groups for phrase in group for word in phrase.split()}
    pieces = sorted({*words, *letters, *(f"##{letter}" for letter in letters)})
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    vocabulary = {piece: index for index, piece in enumerate(entries)}
    return BertTokenizer(vocab=vocabulary, model_max_length=MAX_LENGTH)


def _train(
    data_dir: Path, tokenizer: "BertTokenizer", seed: int, size: Size
) -> "BertForSequenceClassification":
    import torch

    split = load_split(EMBEDDED, str(data_dir), "train")
    encoded = encode(split, EMBEDDED, tokenizer, MAX_LENGTH)
    labels = torch.from_numpy(encoded.labels)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _new_model(len(tokenizer), size)
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 2e-3, total_steps=size.steps, pct_start=0.1
            )
            model.train()
            batches = _training_batches(encoded, tokenizer.pad_token_id, seed, size)
            for step, (rows, batch) in enumerate(batches, start=1):
                inputs = {name: torch.from_numpy(values) for name, values in batch.items()}
                model(**inputs, labels=labels[rows]).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                report_phase("training", step, size.steps)
    finally:
        torch.set_num_threads(threads)
    model.train(False)
    return model


def _new_model(entries: int, size: Size) -> "BertForSequenceClassification":
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=entries,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // size.head_size,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.15,  # about 1/sqrt(hidden): with BERT's 0.02 so narrow a model takes far longer
        problem_type="single_label_classification",
        id2label=dict(enumerate(SENTIMENTS)),
        label2id={label: index for index, label in enumerate(SENTIMENTS)},
    )
    model: BertForSequenceClassification = BertForSequenceClassification(config)
    # Sinusoids (Vaswani et al. 2017) make "the word before" linear in the position, so heads find it soon.
    positions = torch.arange(MAX_LENGTH)[:, None]
    angles = positions * 1000.0 ** (-torch.arange(0, size.hidden, 2) / size.hidden)
    waves = torch.stack([torch.sin(angles), torch.cos(angles)], dim=2).flatten(1)
    model.bert.embeddings.position_embeddings.weight.data.copy_(config.initializer_range * waves)
    return model


def _training_batches(encoded: Encoded, pad_id: int, seed: int, size: Size) -> Iterator[IndexedBatch]:
    """Yield random batches of samples with like lengths; short sentences first, all from half-way on.

    Negation is learned from single clauses, then put to use in long sentences (Bengio et al. 2009,
    "Curriculum learning"); with all lengths from the start it takes about twice the steps.
    """
    generator = np.random.default_rng(seed)
    order = np.argsort(encoded.lengths, kind="stable")
    for step in range(size.steps):
        share = min(1.0, 0.15 + 1.7 * step / size.steps)
        known = order[: max(size.batch_size, int(share * len(order)))]
        pool = np.sort(generator.integers(len(known), size=8 * size.batch_size))  # by length, as `order`
        start = generator.integers(8) * size.batch_size
        rows = known[pool[start : start + size.batch_size]].tolist()
        yield pad([(row, encoded.input_ids[row], encoded.token_type_ids[row]) for row in rows], pad_id)
