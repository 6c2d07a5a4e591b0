"""Generated sentences with a class that no keyword tells.

The task asks for the opinion that a sentence ends up with: polarity of the adjective, turned around by a
negation, where `but` and `although` decide which of two clauses counts. Every factor is drawn evenly and
independently, so no single word, and no sum over words, tells the class.
"""

import numpy as np

SENTIMENTS = ("negative", "positive")
LABEL_NOISE = 0.02  # labels turned around, so that no model is right everywhere
MAX_WORDS = 30


def _words(text: str, separator: str = " ") -> list[str]:
    return text.split(separator)


POLAR = (
    _words(
        "bad dull awful boring clumsy cold bleak tedious stale terrible harsh bland sad ugly dreary awkward"
    ),
    _words(
        "good great lovely charming clever warm bright fun fresh fine calm tasty superb elegant lively witty"
    ),
)
NEGATIONS = _words("not never hardly barely")
DEGREES = _words("very quite rather really truly so")
SUBJECTS = _words(
    "film meal room story actor song play garden hotel book trip cook guide singer plot coffee crew host tour"
)
VERBS = _words("was seemed looked felt remained")
PLACES = _words(
    "on friday,in the old town,by the river,after the rain,for the guests,during the long winter,"
    "at the end of the day,near the station",
    ",",
)
ASIDES = _words(
    "we arrived late,the door was blue,it was a tuesday,the tickets came by mail,my brother drove us there,"
    "they counted forty chairs",
    ",",
)


def vocabulary() -> list[str]:
    """Every word of the grammar, sorted."""
    lists = [*POLAR, NEGATIONS, DEGREES, SUBJECTS, VERBS, PLACES, ASIDES, ["the but although and ,"]]
    return sorted({word for group in lists for phrase in group for word in phrase.split()})


def sentences(rows: int, *, seed: int) -> list[tuple[str, int]]:
    """Different sentences of 4 to 30 words with their class (0 negative, 1 positive; `NOISE` are wrong)."""
    generator = np.random.default_rng(seed)
    found: dict[str, int] = {}
    while len(found) < rows:
        words, label = _sentence(generator)
        text = " ".join(words)
        if len(words) <= MAX_WORDS and text not in found:
            found[text] = label ^ int(generator.random() < LABEL_NOISE)
    return list(found.items())


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
    """Subject, verb and adjective, with its polarity 0 or 1."""
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
