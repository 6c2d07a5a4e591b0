"""Rows that do not fit their task are one sentence, in every kind."""

import pytest

from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.task import RERANK, get_task, with_classes
from qdqbench.quantize.utils.errors import UserError

from ....integration.heads import TAGS
from ....integration.tiny import tokenizer
from ....support.tables import write_table

SST2, STSB, QA = get_task("sst2"), get_task("stsb"), get_task("qa")
TOKENS, WORDS = get_task("tokens"), get_task("tokens", metrics=["accuracy"])
TAGGED = with_classes(TOKENS, TAGS)
MOODS = with_classes(get_task("multi-label"), ["joy", "anger", "fear"])


def labels(*values, **others):
    return {"sentence": ["good"] * len(values), "label": values} | others


def scores(*values):
    return {"sentence1": ["a"] * len(values), "sentence2": ["b"] * len(values), "label": values}


def ranked(*values, query="q"):
    return {"query": ["q"] * (len(values) - 1) + [query], "passage": ["p"] * len(values), "label": values}


def tags(words, values, column="ner_tags"):
    return {"tokens": [words], column: [values]}


def marks(*rows):
    return {"text": ["a"] * len(rows), "labels": rows}


GOOD = {"text": ["good"], "answer_start": [2]}


def asked(*answers, **others):
    both = {"question": ["what is it"] * len(answers), "context": ["a good film"] * len(answers)}
    return both | {"answers": answers} | others


NO_IOB2 = r"no IOB2 tags .* but {}, {}.*--metric accuracy"
FIRST = "'a lonely one'"


@pytest.mark.parametrize(
    ("task", "table", "message"),
    [
        (SST2, labels(0, 1, 2), "from 0 to 2.*classes 0 to 1.*--num-labels"),
        (SST2, labels(0, 1, -1), "from -1 to 1.*unlabeled"),
        (SST2, labels(-1, -1), "test splits of GLUE have no labels"),
        (SST2, labels(0, 1, None), "missing in 1 of 3 rows"),
        (SST2, labels(None, None), "missing in 2 of 2 rows"),
        (SST2, labels("a", "b"), "map them to integers from 0 to 1"),
        (SST2, labels(0.5, 0.5), "regression needs --num-labels 1"),
        (SST2, labels(0, 1, 1, sentence=["a", None, None]), "2 empty .* first in row 1"),
        (SST2, labels(0, 1, sentence=[1, 2]), "int64, not texts"),
        (STSB, labels(1, 2), r"sentence1 \(nearest: sentence\), sentence2 .*columns are sentence, label"),
        (STSB, scores(0.5, float("inf")), "(not finite|missing) in 1 of 2"),
        (STSB, scores(-1.0, -1.0), "test splits"),
        (RERANK, ranked(3.0, 0.0), "go from 0 to 3, but relevance is from 0 to 1; divide grades"),
        (RERANK, ranked(float("nan"), 0.0), "are (not finite|missing)"),
        (RERANK, ranked(0.0, 0.0), "are all 0, so there is nothing to find"),
        (RERANK, ranked(1.0, 0.0, 1.0, query="a lonely one"), f"1 of 2 queries, which have one .*{FIRST}"),
        (MOODS, marks(["joy"], ["grief"], []), "does not know grief"),
        (MOODS, marks([0], [3], []), "have 3, but are numbers of classes from 0 to 2"),
        (MOODS, marks([0.5, 1, 0]), "have 0.5, but are numbers"),
        (MOODS, marks([0, None], [], [1]), "are missing in part in 1 of 3 rows"),
        (TAGGED, tags(["a", None], ["O", "O"]), "'tokens' of .* has null words in 1 texts"),
        (TAGGED, tags("a b", ["O"]), "'tokens' of .* holds texts, not lists of words"),
        (TAGGED, tags(["a"], "O"), "are texts; map them to lists with a tag for each word"),
        (TAGGED, tags(["a"], ["O"], "tags"), r"no column ner_tags .*--label-column"),
        (TAGGED, tags(["a", "b"], ["O"]), "not as many as the words in 1 of 1 rows"),
        (TAGGED, tags(["a", "b"], ["O", None]), "missing for 1 words"),
        (TAGGED, tags(["a", "b"], [0, 5]), "from 0 to 5, but there are tags 0 to 4"),
        (TAGGED, tags(["a"], ["B-ORG"]), "not those of the model: it does not know B-ORG"),
        (
            with_classes(WORDS, ["LABEL_0", "LABEL_1"]),
            tags(["a"], ["O"]),
            "does not name its .* whose config",
        ),
        (with_classes(TOKENS, ["NOUN", "VERB"]), tags(["a"], [0]), NO_IOB2.format("NOUN", "VERB")),
        (
            with_classes(TOKENS, ["LABEL_0", "LABEL_1"]),
            tags(["a"], [0]),
            NO_IOB2.format("LABEL_0", "LABEL_1"),
        ),
        (QA, asked("good"), "are texts; map them to objects with the lists text and answer_start"),
        (QA, asked({"text": ["it"], "answer_start": [1]}), "not at their answer_start .* in 1 of 1 rows"),
        (QA, asked({"text": ["a", "b"], "answer_start": [0]}), "in all but 1 of 1 rows"),
        (QA, asked({"text": [None, "a"], "answer_start": [0, 0]}), "not at their answer_start .* in 1 of"),
        (QA, asked({"text": ["a"], "answer_start": [None]}, GOOD), "not at their .* in 1 of 2"),
        (QA, asked({"text": None, "answer_start": [0]}, GOOD), "in all but 1 of 2 rows"),
        (QA, asked(GOOD, question=["is " * 20]), "1 texts in column 'question' exceed 12 tokens"),
        (QA, asked(GOOD, context=[None]), r"'context' of .* (holds null|has 1 empty)"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_that_do_not_fit_are_one_sentence(task, table, message, suffix, tmp_path):
    write_table(tmp_path / f"train.{suffix}", table)
    with pytest.raises(UserError, match=message) as error:
        encode(load_split(task, str(tmp_path), "train"), task, tokenizer(), 24)
    assert "\n" not in str(error.value)
