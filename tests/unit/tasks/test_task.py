import pytest

from qdqbench.quantize.tasks.task import EMBEDDED, GLUE, check_model_fits, get_task
from qdqbench.quantize.utils.errors import UserError

CLASSIFICATION = "single_label_classification"


def test_glue_has_the_nine_tasks_of_the_hub():
    assert list(GLUE) == ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
    others = {name: task.num_labels for name, task in GLUE.items() if task.num_labels != 2}
    assert others == {"stsb": 1, "mnli": 3}
    assert GLUE["mnli"].eval_splits == ("validation_matched", "validation_mismatched")
    assert GLUE["qnli"].text_columns == ("question", "sentence")


def test_known_tasks_come_back_but_for_what_is_given():
    assert {name: get_task(name) for name in GLUE} == GLUE
    assert get_task("embedded") == EMBEDDED
    primary = {"cola": "matthews", "mrpc": "f1", "qqp": "f1", "stsb": "pearson", "rte": "accuracy"}
    assert {name: get_task(name).metrics[0] for name in primary} == primary
    task = get_task("mrpc", text_columns=["a", "b"], label_column="y")
    assert task == GLUE["mrpc"].model_copy(update={"text_columns": ("a", "b"), "label_column": "y"})
    assert get_task("sst2", num_labels=1).metrics == ("pearson", "spearman")


def test_unknown_name_says_the_nearest_and_how_to_name_columns():
    said = r"'sst-2', nearest is 'sst2'.*--text-column .*--label-column"
    with pytest.raises(UserError, match=said):
        get_task("sst-2")


OWN = [(1, ("pearson", "spearman")), (2, ("accuracy",)), (5, ("accuracy",))]


@pytest.mark.parametrize(("labels", "metrics"), OWN)
def test_own_task(labels, metrics):
    task = get_task("reviews", text_columns=["title", "body"], label_column="stars", num_labels=labels)
    assert (task.text_columns, task.label_column, task.metrics) == (("title", "body"), "stars", metrics)
    assert task.kind.name == ("regression" if labels == 1 else "classification")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "--num-labels"),
        ({"num_labels": 0}, "0 labels"),
        ({"text_columns": ["a", "b", "c"], "num_labels": 2}, "one or two text columns"),
        ({"text_columns": ["a", "a"], "num_labels": 2}, "all different"),
        ({"text_columns": ["label"], "num_labels": 2}, "all different"),
        ({"num_labels": 2, "metrics": ["acuracy", "pearson"]}, "acuracy, pearson; choose"),
        ({"num_labels": 1, "metrics": ["accuracy"]}, r"\(regression\) .*choose from pearson"),
        ({"num_labels": 3, "metrics": ["f1"]}, "needs 2 classes"),
    ],
)
def test_fields_that_do_not_fit(fields, message):
    with pytest.raises(UserError, match=message):
        get_task("reviews", **({"text_columns": ["a"]} | fields))


@pytest.mark.parametrize(
    ("task", "labels", "problem_type", "fits"),
    [
        ("sst2", 2, None, True),
        ("sst2", 2, CLASSIFICATION, True),
        ("stsb", 1, "regression", True),
        ("stsb", 1, None, True),
        ("mnli", 3, CLASSIFICATION, True),
        ("sst2", 1, "regression", False),
        ("sst2", 1, None, False),
        ("sst2", 3, None, False),
        ("sst2", 2, "regression", False),
        ("stsb", 2, CLASSIFICATION, False),
    ],
)
def test_model_head_against_task(task, labels, problem_type, fits):
    if fits:
        check_model_fits(get_task(task), model_labels=labels, problem_type=problem_type)
    else:
        with pytest.raises(UserError, match=rf"head is .*{labels} output.*{task}.* needs"):
            check_model_fits(get_task(task), model_labels=labels, problem_type=problem_type)


def test_wrong_head_names_the_tasks_it_would_fit():
    with pytest.raises(UserError, match=r"such a head: stsb\)"):
        check_model_fits(get_task("sst2"), model_labels=1, problem_type="regression")
