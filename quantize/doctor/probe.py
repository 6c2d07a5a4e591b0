"""Whether a library works, asked in a process of its own: one that crashes or hangs is told, not suffered."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 90.0  # for all; torch takes seconds, on a busy machine many
MAX_SAID = 300
_ASK = """
import json, sys
name = sys.argv[1]
module = __import__(name)
found = {"version": str(getattr(module, "__version__", "unknown"))}
if name == "torch":
    found["cuda"] = module.version.cuda
    found["devices"] = module.cuda.device_count() if module.cuda.is_available() else 0
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Probed:
    """What importing a library came to; `error` is None where it worked, or where it is not there."""

    version: str | None
    error: str | None = None
    cuda: str | None = None  # that torch was built for
    devices: int = 0  # that torch sees

    @property
    def there(self) -> bool:
        """Whether it can be used."""
        return self.version is not None


def probe(names: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, Probed]:
    """Import each of some libraries; all at once, and no longer than `timeout_s` together."""
    with tempfile.TemporaryDirectory(prefix="qdqbench-doctor-") as folder:  # nothing here can be imported
        running = {
            name: subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", _ASK, name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
            )
            for name in names
        }
        found = {}
        for name, process in running.items():
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                found[name] = Probed(None, f"did not import within {timeout_s:g} s")
                continue
            found[name] = _result(name, process.returncode, out, err.decode(errors="replace"))
    return found


def _result(name: str, code: int, out: bytes, err: str) -> Probed:
    if code == 0:
        told: dict[str, Any] = json.loads(out.decode(errors="replace").rstrip().rpartition("\n")[2])
        version = "-".join(told["version"].split("-")[:2])  # without the commit that OpenVINO adds
        return Probed(version, cuda=told.get("cuda"), devices=told.get("devices", 0))
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
    if last == f"ModuleNotFoundError: No module named '{name}'":
        return Probed(None)
    if code < 0:
        last = f"crashed with signal {-code}" + (f" after: {last}" if last else "")
    return Probed(None, anonymous(last)[:MAX_SAID] or f"exit status {code}")


def anonymous(text: str) -> str:
    """Text without control characters, the user's name or folders: it goes into a bug report."""
    text = text.replace(sys.prefix, "PYTHON").replace(sys.base_prefix, "PYTHON")
    text = text.replace(str(Path.home()), "~").replace(str(Path.cwd()), ".")
    text = re.sub(r"(?:/home|/Users|/root|[A-Z]:\\Users)(?:[/\\][^\s/\\'\"]+)?", "~", text)
    return "".join(c if c.isprintable() else " " for c in text)
