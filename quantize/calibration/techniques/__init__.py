"""Techniques of calibration: what each does, what it records of it, and what a report says of that."""

# Of a technique: title, count, noun of what is counted, and a sentence that takes the count with its noun.
Change = tuple[str, int, str, str]
