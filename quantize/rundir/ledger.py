"""A file with one line for each finished measurement, so that a killed comparison goes on."""

import json
import os
from pathlib import Path
from typing import Any

from qdqbench.quantize.core import files


class Ledger:
    """Finished measurements by key, appended to the file as they come.

    The first line holds everything that the others depend on. A last line that was torn by a kill is dropped.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Take up the file where its settings are these, else begin anew.

        Raises:
            UserError: the folder cannot be written.
        """
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        before = _lines(path)
        header = before[0] if before else None
        self.anew = bool(before) and header != {"settings": settings}  # what was there is lost
        if before and not self.anew:
            self.found = {line["key"]: line for line in before[1:]}
        self.resumed = len(self.found)
        whole = [{"settings": settings}, *self.found.values()]
        files.write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in whole))

    def append(self, key: str, value: dict[str, Any], seconds: float) -> None:
        """Add a finished measurement; on the disk when this returns.

        Raises:
            UserError: the file cannot be written.
        """
        line = {"key": key, "value": value, "seconds": seconds}
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line, allow_nan=False) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise files.cannot_write(self.path, error) from error
        self.found[key] = line

    def told(self) -> str | None:
        """What a user must know before it begins: that it goes on, or does not."""
        if self.anew:
            return f"{self.path}: of other settings, data or code; measuring anew"
        return f"{self.path}: going on after {self.resumed} finished measurements" if self.resumed else None

    @property
    def seconds(self) -> float:
        """Time of all measurements, those of earlier calls included."""
        return float(sum(line["seconds"] for line in self.found.values()))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of the file up to the first that is not one."""
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        keys = {"key", "value", "seconds"} if found else {"settings"}
        if not text.endswith("\n") or not isinstance(line, dict) or set(line) != keys:
            break
        found.append(line)
    return found
