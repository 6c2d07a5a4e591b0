"""Question answering: windows, spans, answers, and SQuAD's scores."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.standalone import texts
from qdqbench.quantize.standalone.answers import LONGEST
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.kinds.questions import QUESTIONS, Questions, exact_match, f1, normalized
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import UserError

from ....integration import heads
from ....integration.tiny import tokenizer
from ....support.tables import write_table

QA = get_task("qa")


@pytest.mark.parametrize(
    ("said", "right", "exact", "overlap"),
    [  # the first four: the examples of the cards of `squad` and `squad_v2` of evaluate
        ("1976", ["1976"], 1, 1),
        ("1999", ["1976"], 0, 0),
        ("Beyonce", ["Beyoncé and Bruno Mars"], 0, 0),
        ("climate change", ["climate change"], 1, 1),
        ("The  Norman, people!", ["norman people", "Normans"], 1, 1),
        ("the Duke of Normandy", ["Duke Richard of Normandy"], 0, 6 / 7),
        ("", [], 1, 1),
        ("something", [], 0, 0),
        ("", ["1976"], 0, 0),
        ("the", ["a"], 1, 1),
    ],
)
def test_scores_are_those_of_squad(said, right, exact, overlap):
    assert (exact_match(said, right), f1(said, right)) == (exact, pytest.approx(overlap))


def test_normalized_answers():
    assert normalized("An  apple -- a Day, the Doctor's") == "apple day doctors"


def encoded_of(tmp_path, table, max_length=24):
    write_table(tmp_path / "train.jsonl", table)
    return encode(load_split(QA, str(tmp_path), "train"), QA, tokenizer(), max_length)


def test_a_row_of_very_many_windows_is_refused_by_its_number(tmp_path):
    table = heads.asked(3, 0)
    table["context"][1] += " word" * 20_000
    with pytest.raises(UserError, match=r"row 1 of .*train\.jsonl would be read in \d{3,} windows, and 256"):
        encoded_of(tmp_path, table)


def test_rows_are_encoded_a_few_windows_at_once(tmp_path, monkeypatch):
    table = heads.asked(20, 0)
    whole = encoded_of(tmp_path, table)
    sizes = []
    monkeypatch.setattr(texts, "MOST_WINDOWS", most := max(np.bincount(whole.samples)) + 1)
    real = texts.split_windows
    monkeypatch.setattr(texts, "split_windows", lambda counts: sizes.append(counts) or real(counts))
    parted = encoded_of(tmp_path, table)
    assert sum(sizes[0]) == whole.rows
    assert all(sum(sizes[0][part]) <= most for part in real(sizes[0]))
    assert len(real(sizes[0])) > 5
    assert [row.tolist() for row in parted.input_ids] == [row.tolist() for row in whole.input_ids]
    assert parted.samples.tolist() == whole.samples.tolist()


def test_windows_cover_the_context_and_hold_the_answer(tmp_path):
    table = heads.asked(20, 0)
    encoded = encoded_of(tmp_path, table)
    gold = encoded.gold
    assert (len(gold), encoded.rows, encoded.truncated) == (20, len(encoded.samples), 0)
    assert encoded.rows > 30
    assert encoded.lengths.max() <= 24
    seen = [set() for _ in range(20)]
    marks = np.split(encoded.labels, np.cumsum(encoded.answers)[:-1])
    answered = set()
    spans = [spans for windows in gold.windows for spans in windows]
    for sample, window, mark in zip(encoded.samples, spans, marks, strict=True):
        assert mark.sum(axis=0).tolist() == [1, 1]
        first, last = mark.argmax(axis=0)
        seen[sample].update(span for start, end in window[window[:, 0] >= 0] for span in range(start, end))
        if first:
            answered.add(int(sample))
            text = gold.contexts[sample][window[first, 0] : window[last, 1]]
            assert text == gold.answers[sample][0]
    assert answered == set(range(20))
    for sample, context in enumerate(gold.contexts):
        assert seen[sample] == {at for at, letter in enumerate(context) if letter != " "}
    # a model that is sure of these marks gets everything right
    found = metrics.compute(QA, 10 * encoded.labels + 0, gold)
    assert found == {"f1": 1.0, "exact_match": 1.0}
    part = encoded.part(np.array([7, 3]))
    assert part.gold.answers == [gold.answers[7], gold.answers[3]]
    assert metrics.compute(QA, 10 * part.labels, part.gold)["exact_match"] == 1


def one_window(length, *, unanswerable=False):
    """A context of single letters, behind a first token and two of the question."""
    spans = np.array([[-1, -1]] * 3 + [[2 * i, 2 * i + 1] for i in range(length)] + [[-1, -1]])
    return Questions([" ".join("x" * length)], [["x"]], [[spans]], unanswerable)


@given(st.integers(1, 60), st.integers(0, 2**16))
def test_the_best_span_is_that_of_all_pairs(length, seed):
    gold = one_window(length)
    logits = np.random.default_rng(seed).normal(size=(length + 4, 2)).astype(np.float32)
    scores = {
        (i, j): logits[3 + i, 0] + logits[3 + j, 1]
        for i in np.argsort(-logits[3:-1, 0])[:20]
        for j in np.argsort(-logits[3:-1, 1])[:20]
        if 0 <= j - i < LONGEST
    }
    (text,) = QUESTIONS.predict(logits, gold)
    first, last = max(scores, key=scores.__getitem__) if scores else (0, -1)
    assert len(text) == 2 * (last - first + 1) - (last >= first)


def test_none_is_an_answer_only_where_questions_may_have_none():
    logits = np.zeros((8, 2), dtype=np.float32)
    logits[0] = 5  # the first token
    logits[4] = 1
    assert QUESTIONS.predict(logits, one_window(4)).tolist() == ["x"]
    assert QUESTIONS.predict(logits, one_window(4, unanswerable=True)).tolist() == [""]
    sure, gold = (
        np.where(np.arange(8)[:, None] == 4, 6, logits).astype(np.float32),
        one_window(4, unanswerable=True),
    )
    assert QUESTIONS.predict(sure, gold).tolist() == ["x"]
    both = replace(gold, windows=[2 * gold.windows[0]])  # none of all windows has it, or one has
    answers = [np.concatenate(pair) for pair in ((sure * 0.9, logits), (sure * 0, logits), (logits, logits))]
    assert [str(*QUESTIONS.predict(each, both)) for each in answers] == ["x", "x", ""]


def test_a_question_without_answer_is_learned_at_the_first_token(tmp_path):
    table = heads.asked(4, 1, longest=8)
    table["answers"][2] = {"text": [], "answer_start": []}
    encoded = encoded_of(tmp_path, table)
    assert encoded.gold.unanswerable
    marks = np.split(encoded.labels, np.cumsum(encoded.answers)[:-1])
    assert [mark[0].tolist() for mark in marks] == [[0, 0], [0, 0], [1, 1], [0, 0]]
    assert metrics.compute(QA, 10 * encoded.labels, encoded.gold)["exact_match"] == 1


def test_tasks_over_tokens_have_their_columns_and_classes():
    with pytest.raises(UserError, match="give 2 text columns, all different"):
        get_task("squad", text_columns=["context"])
    with pytest.raises(UserError, match="takes its classes from the model; drop --num-labels"):
        get_task("tokens", num_labels=3)
    assert get_task("qa", text_columns=["q", "c"], label_column="a").label_column == "a"
