"""Multi-label classification: labels in all forms that data have, scores of scikit-learn, losses of torch."""

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import accuracy_score, f1_score

from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import add_data_classes, has_label_lists, load_split
from qdqbench.quantize.tasks.kinds.multilabel import MULTI_LABEL
from qdqbench.quantize.tasks.task import check_model_fits, get_task, with_classes
from qdqbench.quantize.utils.errors import UserError

from ....integration.tiny import tokenizer

CLASSES = ("joy", "anger", "fear")
TASK = with_classes(get_task("multi-label"), CLASSES)
OWN = get_task("own", text_columns=["text"], num_labels=3)
MARKS = [[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]]
NUMBERS = [[0, 2], [], [2, 1], [0, 1, 2]]
NAMED = [[CLASSES[number] for number in row] for row in NUMBERS]
NAMES = datasets.ClassLabel(names=["fear", "anger", "joy"])  # in an order of their own
FORMS = {
    "names": (NAMED, datasets.Value("string")),
    "numbers": (NUMBERS, datasets.Value("int64")),
    "numbers with names": ([[2 - number for number in row] for row in NUMBERS], NAMES),
    "marks": (MARKS, datasets.Value("int64")),
    "marks as floats": (MARKS, datasets.Value("float32")),
    "marks as booleans": (MARKS, datasets.Value("bool")),
}


def write(folder, rows, kind, length=-1):
    feature = datasets.Sequence(kind, length=length)
    table = datasets.Dataset.from_dict(
        {"text": ["a film", "good", "it is", "the plot"], "labels": rows},
        features=datasets.Features({"text": datasets.Value("string"), "labels": feature}),
    )
    for split in ("train", "validation"):
        table.to_parquet(folder / f"{split}.parquet")
    return str(folder)


def gold_of(task, folder):
    encoded = encode(load_split(task, folder, "validation"), task, tokenizer(), 32)
    assert encoded.labels.dtype == np.float32
    assert (encoded.labels == encoded.gold).all()
    return encoded.gold


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_read_in_every_form(form, tmp_path):
    folder = write(tmp_path, *FORMS[form])
    assert has_label_lists(OWN.model_copy(update={"label_column": "labels"}), folder)
    assert gold_of(TASK, folder).tolist() == MARKS


def test_lists_of_one_length_and_columns_of_marks_are_read_too(tmp_path):
    assert gold_of(TASK, write(tmp_path, *FORMS["marks"], length=3)).tolist() == MARKS
    rows = [f"a,{x},{y},{z}" for x, y, z in MARKS]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.parquet").unlink()
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,joy,anger,fear", *rows]))
    task = TASK.model_copy(update={"label_column": "joy, anger,fear"})
    assert gold_of(task, str(tmp_path)).tolist() == MARKS
    assert add_data_classes(task, str(tmp_path)).classes == CLASSES
    (tmp_path / "validation.csv").write_text("text,joy,anger,fear\na,0,2,\n")
    with pytest.raises(UserError, match=r"column 'anger'.* are 0 or 1 in columns with .*, not 2"):
        load_split(task, str(tmp_path), "validation")


def test_a_training_takes_the_classes_of_its_data(tmp_path):
    for form, found in {
        "names": ("anger", "fear", "joy"),
        "numbers with names": ("fear", "anger", "joy"),
        "numbers": ("LABEL_0", "LABEL_1", "LABEL_2"),
        "marks": ("LABEL_0", "LABEL_1", "LABEL_2"),
    }.items():
        assert add_data_classes(get_task("multi-label"), write(tmp_path, *FORMS[form])).classes == found
    alone = write(tmp_path, [[0], [1], [1], [0]], datasets.Value("int64"))  # no marks of one class
    assert add_data_classes(get_task("multi-label"), alone).classes == ("LABEL_0", "LABEL_1")


def test_labels_that_are_all_empty_are_refused(tmp_path):
    with pytest.raises(UserError, match="are all empty"):
        load_split(TASK, write(tmp_path, [[]] * 4, datasets.Value("string")), "validation")


MATRICES = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[arrays(np.int8, (n, 3), elements=st.integers(0, 1))] * 2)
)


@given(MATRICES)
def test_scores_are_those_of_scikit_learn(both):
    gold, said = both
    logits = np.where(said, 0.5, -3).astype(np.float32)
    found = metrics.compute(TASK, logits, gold)
    assert found == pytest.approx(
        {
            "f1_micro": f1_score(gold, said, average="micro", zero_division=0),
            "f1_macro": f1_score(gold, said, average="macro", zero_division=0),
            "exact_match": accuracy_score(gold, said),
        }
    )
    table = MULTI_LABEL.table(MULTI_LABEL.predict(logits, gold), gold)
    assert MULTI_LABEL.right(table).mean() == pytest.approx(found["exact_match"])
    for name, metric in MULTI_LABEL.metrics.items():  # a weight counts as often as a row
        weights = np.arange(len(gold)) % 3 + 1.0
        repeated = np.repeat(table, weights.astype(int), axis=0)
        assert metric.weighted(weights[None], table)[0] == pytest.approx(metric.value(repeated)), name


def test_samples_are_told_by_the_names_of_their_classes():
    marks = np.array(MARKS, dtype=np.int8)
    assert MULTI_LABEL.label_texts(marks, CLASSES) == ["joy fear", "none", "anger fear", "joy anger fear"]
    assert MULTI_LABEL.predict(marks - 0.5, marks).tolist() == ["0 2", "none", "1 2", "0 1 2"]
    assert MULTI_LABEL.constant(np.ones((4, 3)), marks)
    assert not MULTI_LABEL.constant(marks - 0.5, marks)


@pytest.mark.parametrize(
    ("task", "problem", "told"),
    [
        (OWN, "multi_label_classification", "lists of classes"),
        (TASK, "single_label_classification", "needs 3 classes that are each there or not"),
    ],
)
def test_a_head_of_another_kind_is_refused_by_name(task, problem, told):
    with pytest.raises(UserError, match=told):
        check_model_fits(task, model_labels=3, problem_type=problem)
    check_model_fits(TASK, model_labels=3, problem_type=None)
