"""Run mypy --strict over the three packages, and over what the page for Python says.

mypy does not follow editable installs with mapped folders, so links under build/types show it one package.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tutorials" / "python.md"


def main() -> int:
    """Make the links and run mypy."""
    package = ROOT / "build" / "types" / "qdqbench"
    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():  # of modules that are gone: import-linter reads the folder too
        if not link.exists():
            link.unlink()
    links = {name: ROOT / name for name in ("quantize", "eval", "recipes")}
    for name, target in (links | {path.name: path for path in (ROOT / "api").glob("*[a-z]")}).items():
        if not (package / name).is_symlink():
            (package / name).symlink_to(target)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (package.parent / "python_page.py").write_text("\n".join(blocks))
    return subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
