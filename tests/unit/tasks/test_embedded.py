import re
from collections import Counter

import numpy as np
import pytest

from qdqbench.quantize.tasks import embedded
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.embedded import ASIDES, LABEL_NOISE, MAX_WORDS, NEGATIONS, POLAR, sentences
from qdqbench.quantize.tasks.task import check_model_fits, get_task
from qdqbench.quantize.utils.errors import UserError

TINY = embedded.Size(train_rows=60, validation_rows=20, layers=1, hidden=32, steps=3, batch_size=8)


@pytest.fixture(scope="module")
def rows():
    return sentences(5000, seed=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return embedded.write_embedded(tmp_path_factory.mktemp("run") / "embedded", size=TINY)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read(text):
    """The class of a sentence, read the other way round: from the words."""
    for aside in ASIDES:
        text = text.removeprefix(f"{aside} and ").removesuffix(f" , and {aside}")
    counts = re.sub(r".* but |^although .* , | , although .*", "", text).split()
    positive = bool(set(counts) & set(POLAR[1]))
    assert positive != bool(set(counts) & set(POLAR[0]))
    return int(positive != bool(set(counts) & set(NEGATIONS)))


def test_sentences_vary_and_follow_the_grammar_but_for_the_noise(rows):
    lengths = Counter(len(text.split()) for text, _ in rows)
    assert len({text for text, _ in rows}) == len(rows) == 5000
    assert min(lengths) == 4
    assert 25 < max(lengths) <= MAX_WORDS
    assert abs(np.mean([label for _, label in rows]) - 0.5) < 0.02
    wrong = np.mean([read(text) != label for text, label in rows])
    assert LABEL_NOISE / 2 < wrong < LABEL_NOISE * 1.5
    assert sentences(50, seed=0) == rows[:50] != sentences(50, seed=1)


def test_no_bag_of_words_solves_the_task(rows):
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    texts, labels = zip(*rows, strict=True)
    counts = CountVectorizer(token_pattern=r"\S+").fit_transform(texts)
    model = LogisticRegression(max_iter=2000).fit(counts[:4000], labels[:4000])
    assert model.score(counts[4000:], labels[4000:]) < 0.65


def test_default_size_suits_int8_attention():
    size = embedded.Size()
    assert size.head_size in (16, 32, 64)
    assert size.hidden % size.head_size == 0
    assert size.train_rows >= 4000
    assert size.validation_rows >= 1000


def test_data_is_read_like_any_task_and_held_out(run):
    task = get_task("embedded")
    train, held_out = (load_split(task, str(run.data_dir), split) for split in ("train", "validation"))
    assert (train.rows, held_out.rows) == (60, 20)
    assert not set(train.dataset[:]["sentence"]) & set(held_out.dataset[:]["sentence"])


def test_model_is_read_like_any_model(run, capfd):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForSequenceClassification.from_pretrained(run.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(run.model_dir)
    logging.enable_progress_bar()
    task = get_task("embedded")
    check_model_fits(task, model_labels=model.config.num_labels, problem_type=model.config.problem_type)
    assert model.config.id2label == {0: "negative", 1: "positive"}
    encoded = encode(load_split(task, str(run.data_dir), "validation"), task, tokenizer, 128)
    unknown = tokenizer.unk_token_id
    assert not any(unknown in ids for ids in encoded.input_ids)
    assert unknown not in tokenizer("words it never saw, in 2 lines!")["input_ids"]
    assert len(tokenizer) == model.config.vocab_size
    assert capfd.readouterr() == ("", "")


def test_same_seed_same_bytes_whatever_the_threads(run, tmp_path):
    import torch

    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(2)
    try:
        again = embedded.write_embedded(tmp_path / "again", size=TINY)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert contents(again.model_dir.parent) == contents(run.model_dir.parent)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_progress_and_reuse(tmp_path, monkeypatch, capfd):
    seen = []
    monkeypatch.setattr(embedded, "report_phase", lambda *told: seen.append(told))
    run = embedded.write_embedded(tmp_path / "run", size=TINY)
    assert seen == [("training", step, 3) for step in (1, 2, 3)]
    before = contents(tmp_path)
    assert embedded.write_embedded(tmp_path / "run", size=TINY) == run
    assert len(seen) == 3
    assert contents(tmp_path) == before
    embedded.write_embedded(tmp_path / "run", seed=1, size=TINY)
    assert len(seen) == 6
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert after["run/model/model.safetensors"] != before["run/model/model.safetensors"]
    assert after["run/data/embedded/train.parquet"] != before["run/data/embedded/train.parquet"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_interrupted_training_leaves_nothing(tmp_path, monkeypatch, error):
    def stop(*_):
        raise error

    monkeypatch.setattr(embedded, "report_phase", stop)
    with pytest.raises(error):
        embedded.write_embedded(tmp_path / "run", size=TINY)
    assert list(tmp_path.iterdir()) == []


def test_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    told = {"": "holds something", "mine.txt": "holds something", "mine.txt/run": "choose another --out"}
    for name, said in told.items():
        with pytest.raises(UserError, match=said):
            embedded.write_embedded(tmp_path / name, size=TINY)
    assert contents(tmp_path) == {"mine.txt": b"keep"}
