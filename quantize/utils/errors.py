"""The one exception tree of qdqbench; the command line turns each into its exit status.

QdqError            exit 1   (base; never raised itself)
├── UserError       exit 1   bad input: one sentence that says what, where and what to do
│   └── Unwritable           an output cannot be written, as on a full disk
├── CheckFailed     exit 2   everything ran, but a check or the gate does not hold
└── MissingDevice   exit 3   a needed device or library is not there
"""

LONGEST = 4000  # characters of a sentence: a foreign file may name things at any length


class QdqError(Exception):
    exit_code = 1


class UserError(QdqError):
    """Bad input or a failed step; the message is one sentence with the fix."""

    def __str__(self) -> str:
        text, half = super().__str__(), LONGEST // 2
        return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


class Unwritable(UserError):
    """An output that cannot be written, as where the disk is full; it says nothing of what was tried."""


class CheckFailed(QdqError):
    exit_code = 2


class MissingDevice(QdqError):
    exit_code = 3
