"""Token classification: words find their tags by name and by first token; entities are seqeval's."""

from dataclasses import replace

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval import metrics as seqeval

from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import add_data_classes, load_split
from qdqbench.quantize.tasks.kinds.tokens import Tagged
from qdqbench.quantize.tasks.task import get_task, with_classes
from qdqbench.quantize.utils.errors import UserError

from ....integration import heads
from ....integration.tiny import tokenizer
from ....support.tables import write_table

IOB2 = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TASK = with_classes(get_task("tokens"), IOB2)
SENTENCES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=8), min_size=1, max_size=6)


def gold(sentences):
    return Tagged(np.concatenate(sentences), np.array([len(tags) for tags in sentences]), IOB2)


@given(SENTENCES, st.integers(0, 2**16))
def test_scores_are_those_of_seqeval(sentences, seed):
    truth = gold([np.array(tags) for tags in sentences])
    made = np.random.default_rng(seed).integers(0, 5, len(truth.tags))
    made = np.where(np.random.default_rng(seed + 1).random(len(made)) < 0.7, truth.tags, made)
    logits = np.eye(5, dtype=np.float32)[made]
    found = metrics.compute(TASK, logits, truth)
    names = [[IOB2[tag] for tag in tags] for tags in sentences]
    said = [[IOB2[tag] for tag in tags] for tags in truth.by_sentence(made)]
    with np.errstate(all="ignore"):
        expected = {
            "f1": seqeval.f1_score(names, said, zero_division=0),
            "precision": seqeval.precision_score(names, said, zero_division=0),
            "recall": seqeval.recall_score(names, said, zero_division=0),
            "accuracy": seqeval.accuracy_score(names, said),
        }
    assert found == pytest.approx(expected)


def test_what_is_resampled_is_a_sentence():
    """Errors of a sentence go together: fewer, longer ones make a larger standard error."""
    random = np.random.default_rng(0)
    tags = random.integers(1, 5, 2000)
    wrong = np.repeat(random.random(100) < 0.5, 20)
    logits = np.eye(5, dtype=np.float32)[np.where(wrong, 0, tags)]
    errors = [
        metrics.stderr(TASK, logits, Tagged(tags, np.full(2000 // long, long), IOB2), seed=0)["accuracy"]
        for long in (1, 20)
    ]
    assert errors[1] == pytest.approx(np.sqrt(wrong.mean() * (1 - wrong.mean()) / 100), rel=0.1)
    assert errors[1] > 3 * errors[0]


def test_a_part_keeps_whole_sentences():
    whole = gold([np.array([0, 1]), np.array([2, 2, 3]), np.array([4])])
    part = whole[np.array([2, 0])]
    assert (part.tags.tolist(), part.words.tolist(), len(part)) == ([4, 0, 1], [1, 2], 2)


def split_of(tmp_path, table, task=None):
    write_table(tmp_path / "train.jsonl", table)
    return load_split(task or with_classes(get_task("tokens"), heads.TAGS), str(tmp_path), "train")


def test_words_are_told_by_their_first_token_and_what_is_cut_is_counted(tmp_path):
    words = ["good", "dulldull", "fine", "is", "awful"]  # the second is one unknown token
    table = {"tokens": [words, ["a"]], "ner_tags": [["B-GOOD", "B-BAD", "I-GOOD", "O", "B-BAD"], ["O"]]}
    task = with_classes(get_task("tokens"), heads.TAGS)
    encoded = encode(split_of(tmp_path, table), task, tokenizer(), 6)
    assert [each.tolist() for each in encoded.positions] == [[1, 2, 3, 4], [1]]
    assert encoded.labels.tolist() == [1, 3, 2, 0, 0]
    assert "1 of 6 words are not scored" in encoded.warnings[0]
    other = with_classes(task, heads.TAGS[::-1])  # a model with its classes in another order
    assert encode(split_of(tmp_path, table), other, tokenizer(), 6).labels.tolist() == [3, 1, 2, 4, 4]


def test_numbers_with_names_are_matched_by_name_and_without_by_order(tmp_path):
    tags = datasets.Sequence(datasets.ClassLabel(names=["B-BAD", "O"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": tags})
    rows = datasets.Dataset.from_dict({"tokens": [["a", "dull"]], "ner_tags": [[1, 0]]}, features=features)
    rows.to_parquet(tmp_path / "train.parquet")
    task = with_classes(get_task("tokens"), heads.TAGS)
    assert encode(load_split(task, str(tmp_path), "train"), task, tokenizer(), 8).labels.tolist() == [0, 3]
    assert add_data_classes(get_task("tokens"), str(tmp_path)).classes == ("B-BAD", "O")
    (tmp_path / "train.parquet").unlink()
    encoded = encode(split_of(tmp_path, {"tokens": [["a"]], "ner_tags": [[3]]}, task), task, tokenizer(), 8)
    assert (encoded.labels.tolist(), "without names" in encoded.warnings[0]) == ([3], True)
    with pytest.raises(UserError, match="numbers without names; write the tags as texts"):
        add_data_classes(get_task("tokens"), str(tmp_path))


def test_tags_that_are_no_entities_are_scored_by_word():
    truth = replace(gold([np.array([0, 1, 2])]), classes=("NOUN", "VERB", "X", "Y", "Z"))
    logits = np.eye(5, dtype=np.float32)[[0, 1, 1]]
    by_word = get_task("tokens", metrics=["accuracy"]).model_copy(update={"num_labels": 5})
    assert metrics.compute(by_word, logits, truth) == {"accuracy": pytest.approx(2 / 3)}
