"""Data for heads that GLUE has no task for, made of MRPC's sentences: tokens, qa and rerank on real text.

    python tools/make_heads.py GLUE-FOLDER OUT
    qdqbench finetune --model path/or/hub-id --task qa --data OUT --max-length 256

GLUE-FOLDER holds `mrpc/train.parquet` and `mrpc/validation.parquet`; OUT gets both files for each task. What
of validation is in the train split too is left out.

`tokens` restores capitals: words in lower case, runs of those that were written with a capital are entities.
`qa` asks for the paraphrase of the question among 4 to 9 sentences. `rerank` asks which of 10 passages
paraphrases the sentence that begins with the query: whole sentences share so many words with their paraphrase
that counting them would do. The wrong ones are of other pairs: of a random few those that share most words.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SPLITS = ("train", "validation")
SENTENCES = (4, 9)  # of a context, fewest and most
PASSAGES = 10  # of a query
QUERY = 6  # words of a query
DRAWN = 400  # pairs that the wrong sentences are chosen from
LONGEST = 22  # words of an answer: nearly all have no more tokens than an answer may have (30)
ENDS = {".", "!", "?"}  # tokens of MRPC, which has spaces around them
Pair = tuple[str, str]


def capitals(words: Iterable[str]) -> list[str]:
    """The tag of each word (IOB2); the first word of a sentence is O, since it always has a capital."""
    tags, first = ["O"], True
    for word in words:
        run = word[:1].isupper() and not first
        tags.append(("B-CAP" if tags[-1] == "O" else "I-CAP") if run else "O")
        first = word in ENDS or (first and not any(map(str.isalnum, word)))
    return tags[1:]


def tagged(sentences: Iterable[str]) -> pd.DataFrame:
    """Columns tokens and ner_tags, of each sentence as lists."""
    rows = [sentence.split() for sentence in sentences]
    lower = [[word.lower() for word in words] for words in rows]
    return pd.DataFrame({"tokens": lower, "ner_tags": [capitals(words) for words in rows]})


def asked(pairs: list[Pair], random: np.random.Generator) -> pd.DataFrame:
    """Columns question, context and answers as SQuAD has them; each pair in both directions."""
    rows: list[dict[str, Any]] = []
    for question, answer in (each for pair in pairs for each in (pair, pair[::-1])):
        if len(answer.split()) > LONGEST:
            continue
        count = random.integers(*SENTENCES, endpoint=True) - 1
        around = _others(pairs, (question, answer), count, random, like=question)
        place = random.integers(len(around), endpoint=True)
        start = sum(len(text) + 1 for text in around[:place])
        context = " ".join([*around[:place], answer, *around[place:]])
        answers = {"text": [answer], "answer_start": [start]}
        rows.append({"question": question, "context": context, "answers": answers})
    return pd.DataFrame(rows)


def ranked(pairs: list[Pair], random: np.random.Generator) -> pd.DataFrame:
    """Columns query, passage and label (1: the paraphrase); the rows of a query stand together."""
    rows: list[tuple[str, str, int]] = []
    queries = {" ".join(sentence.split()[:QUERY]): (sentence, right) for sentence, right in pairs}
    for query, pair in queries.items():
        passages = [pair[1], *_others(pairs, pair, PASSAGES - 1, random, like=query)]
        rows += [(query, passages[at], int(at == 0)) for at in random.permutation(len(passages))]
    return pd.DataFrame(rows, columns=["query", "passage", "label"])


def _others(pairs: list[Pair], pair: Pair, count: int, random: np.random.Generator, like: str) -> list[str]:
    """Sentences of other pairs that share words with a text, in random order."""
    drawn = [pairs[at] for at in random.choice(len(pairs), min(DRAWN, len(pairs)), replace=False)]
    apart = [other for other in drawn if not {*other} & {*pair}]
    texts = dict.fromkeys(other[random.integers(2)] for other in apart)
    words = {*like.lower().split()}
    nearest = sorted(texts, key=lambda text: -len(words & {*text.lower().split()}))[:count]
    return [nearest[at] for at in random.permutation(len(nearest))]


def write(glue: Path, out: Path, seed: int = 0) -> None:
    """Write the three tasks; the same seed gives the same rows."""
    seen: set[str] = set()
    for number, split in enumerate(SPLITS):
        rows = pd.read_parquet(glue / "mrpc" / f"{split}.parquet")
        rows = rows[~(rows.sentence1.isin(seen) | rows.sentence2.isin(seen))]
        right = rows[(rows.label == 1) & (rows.sentence1 != rows.sentence2)]
        pairs = [*zip(right.sentence1, right.sentence2, strict=True)]
        sentences = [*dict.fromkeys([*rows.sentence1, *rows.sentence2])]
        seen.update(sentences)
        random = np.random.default_rng([seed, number])
        made = {"tokens": tagged(sentences), "qa": asked(pairs, random), "rerank": ranked(pairs, random)}
        for task, table in made.items():
            path = out / task / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            table.to_parquet(path, index=False)
            print(f"{path}: {len(table)} rows")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
