"""Exact match and F1 of an answer as SQuAD 2.0 defines them (Rajpurkar et al. 2018, arXiv 1806.03822).

The arithmetic of its official script (https://rajpurkar.github.io/SQuAD-explorer/), which `evaluate` runs as
`squad_v2`. That of SQuAD 1.1 (`squad`) differs only where an answer is nothing but articles and punctuation.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lower case, without punctuation, the articles a, an and the, and doubled spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 where an answer is one of the right ones, or none where there is none, else 0."""
    return float(normalized(answer) in _known(right))


def f1(answer: str, right: Sequence[str]) -> float:
    """The largest F1 of an answer's words with a right one's; as `exact_match` where either has none."""
    return max(_overlap(normalized(answer).split(), known.split()) for known in _known(right))


def _known(right: Sequence[str]) -> list[str]:
    return [text for text in map(normalized, right) if text] or [""]


def _overlap(made: list[str], known: list[str]) -> float:
    if not made or not known:
        return float(made == known)
    same = sum((Counter(made) & Counter(known)).values())
    return 2 * same / (len(made) + len(known))
