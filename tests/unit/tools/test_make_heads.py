"""The data of tools/make_heads.py: honest rows that the tasks read."""

import numpy as np
import pandas as pd
import pytest
from tools import make_heads

from qdqbench.quantize.tasks.data.load import add_tag_classes, load_split
from qdqbench.quantize.tasks.task import get_task

PLACES = ("Rome", "New York", "Oslo", "Lima")
PAIRS = [
    (
        f"Number {row} of the clubs in {PLACES[row % 4]} sold {row} shares .",
        f'" {row} shares were sold in {PLACES[row % 4]} , " said club {row} .',
    )
    for row in range(60)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of the three tasks; two pairs of validation are in the train split, every fifth is no pair."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "mrpc").mkdir()
    for split, pairs in (("train", PAIRS[:40]), ("validation", PAIRS[38:])):
        rows = pd.DataFrame(pairs, columns=["sentence1", "sentence2"])
        rows.assign(label=(np.arange(len(rows)) % 5 > 0).astype(int)).to_parquet(
            folder / "mrpc" / f"{split}.parquet"
        )
    make_heads.write(folder, folder)
    return folder


def table(folder, task, split):
    return pd.read_parquet(folder / task / f"{split}.parquet")


def test_runs_of_capitals_are_entities_and_a_first_word_is_none():
    [words] = [text.split() for text in ["- The Bank of New York fell . Analysts in Rome sold U.S. shares ."]]
    expected = ["O", "O", "B-CAP", "O", "B-CAP", "I-CAP", "O", "O", "O", "O", "B-CAP", "O", "B-CAP", "O", "O"]
    assert make_heads.capitals(words) == expected


@pytest.mark.parametrize("name", ["tokens", "qa", "rerank"])
def test_the_task_reads_both_splits_and_none_of_one_is_in_the_other(made, name):
    task = get_task(name)
    task = add_tag_classes(task, str(made)) if name == "tokens" else task
    train, validation = (load_split(task, str(made), split) for split in make_heads.SPLITS)
    assert (train.notes, validation.notes) == ((), ())
    texts = [{str(row[task.text_columns[-1]]) for row in split.dataset} for split in (train, validation)]
    assert texts[0].isdisjoint(texts[1])


def test_an_answer_is_the_paraphrase_and_stands_among_sentences_of_other_pairs(made):
    paraphrase = dict(PAIRS) | {second: first for first, second in PAIRS}
    for row in table(made, "qa", "train").itertuples():
        text, start = row.answers["text"][0], row.answers["answer_start"][0]
        assert row.context[start:][: len(text)] == text == paraphrase[row.question]
        there = [sentence for sentence in paraphrase if sentence in row.context]
        assert make_heads.SENTENCES[0] <= len(there) <= make_heads.SENTENCES[1]
        assert sum(paraphrase[sentence] in there for sentence in there) == 0


def test_a_query_has_one_right_passage_of_ten(made):
    task = get_task("rerank")
    split = load_split(task, str(made), "train")
    labels, queries = np.array(split.dataset["label"]), task.kind.groups(split.dataset, task)
    assert set(np.bincount(queries)) == {10}
    assert set(np.bincount(queries, labels)) == {1}
    assert len({*np.flatnonzero(labels) % 10}) > 3  # not always in the same place


def test_a_seed_gives_the_same_rows(made, tmp_path):
    make_heads.write(made, tmp_path)
    for name in ("tokens", "qa", "rerank"):
        assert table(made, name, "train").equals(table(tmp_path, name, "train"))
