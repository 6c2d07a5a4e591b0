"""Load the deploy folders of runs with the libraries that read them, and compare with the answers of the run.

python tools/consumers.py RUN [RUN ...]

The programs are the blocks of docs/how-to/other-libraries.md. Each environment is made once under
build/consumers, by pip or npm. The last line of a run is exit status 1 if a library differs.
"""

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qdqbench.quantize.pipeline.session import Session, read_config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "other-libraries.md"
HOME = ROOT / "build" / "consumers"
ROWS = 64
ENVIRONMENTS = {  # packages that were tried; torch's is of the index that pip is set to
    "onnx": ("torch==2.13.0", "sentence-transformers[onnx]==5.7.0"),
    "openvino": ("torch==2.13.0", "sentence-transformers[openvino]==6.2.0"),
    "fastembed": ("fastembed==0.9.1",),
    "js": ("@huggingface/transformers@4.3.1",),
}
KINDS = {"sst2-int8": "classification", "stsb-int8": "regression", "embed-int8": "embedding"}
# Mean and largest difference, by the stage of the run that a library repeats: of probabilities, of scores
# relative to their spread, of embeddings relative to their mean coordinate. ONNX Runtime optimizes here, and
# did not in its stage, so that INT8 values flip: most in embeddings, with whole vectors as answers.
TOLERANCE = {"engine": (0.001, 0.01), "onnxruntime": (0.005, 0.25)}
OF_EMBEDDINGS = TOLERANCE | {"onnxruntime": (0.01, 0.25)}


class Block(NamedTuple):
    environment: str
    name: str  # of the folder that it loads
    library: str
    code: str


def read_blocks(page: str) -> Iterator[Block]:
    """Yield the programs of the page, once for each environment."""
    for section in page.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        for code in re.findall(r"```(?:python|js)\n(.*?)\n```", section, re.DOTALL):
            named = re.match(r"(?:#|//) environments? ([\w, ]+):", code)
            folder = next(name for name in KINDS if name in code)
            for environment in named[1].split(", "):
                yield Block(environment, folder, title, code.replace('"onnx"', f'"{environment}"'))


def program(block: Block, folder: Path, texts: Path, out: Path) -> str:
    """Return a block that answers the texts of a file, and writes its last value into another."""
    *lines, last = block.code.splitlines()
    last = re.sub(r"\(\[.*?\]", "(texts", last, count=1).removesuffix(";")
    code = "\n".join(lines).replace(f"./{block.name}", str(folder)).replace(block.name, str(folder))
    last = last.replace(block.name, str(folder))
    if block.environment == "js":
        read = f'import fs from "fs";\nconst texts = JSON.parse(fs.readFileSync("{texts}"));\n'
        return f'{read}{code}\nconst made = {last};\nfs.writeFileSync("{out}", JSON.stringify(made));\n'
    read = f"import json, pathlib\ntexts = json.loads(pathlib.Path({str(texts)!r}).read_text())\n"
    encoded = "json.dumps(made, default=lambda each: each.tolist())"
    return f"{read}{code}\nmade = {last}\npathlib.Path({str(out)!r}).write_text({encoded})\n"


def make_environment(name: str) -> list[str]:
    """Return the command that runs a program there, after the packages are installed."""
    folder, packages = HOME / name, ENVIRONMENTS[name]
    command = ["node"] if name == "js" else [str(folder / "bin" / "python")]
    if (done := folder / "installed.txt").is_file() and done.read_text() == "\n".join(packages):
        return command
    folder.mkdir(parents=True, exist_ok=True)
    if name == "js":  # scripts of packages would fetch what a CPU does not need
        (folder / "package.json").write_text("{}")
        subprocess.run(["npm", "install", "--ignore-scripts", *packages], cwd=folder, check=True)
    else:
        venv.create(folder, with_pip=True)
        subprocess.run([*command, "-m", "pip", "install", "--quiet", *packages], check=True)
        # optimum-intel asks for it, transformers imports it, and the index's is for another torch
        subprocess.run([*command, "-m", "pip", "uninstall", "--quiet", "-y", "torchvision"], check=True)
    done.write_text("\n".join(packages))
    return command


def ask(block: Block, folder: Path, texts: list[Any]) -> Any:
    """Run a block in its environment and return its answers."""
    command, place = make_environment(block.environment), HOME / block.environment
    given, out = place / "texts.json", place / "answers.json"
    script = place / f"program.{'mjs' if block.environment == 'js' else 'py'}"
    given.write_text(json.dumps(texts))
    out.unlink(missing_ok=True)
    script.write_text(program(block, folder.resolve(), given, out))
    # a launcher's paths and modules are none of theirs
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*command, script], env=kept, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return json.loads(out.read_text())


def known_answers(run: Path, session: Session, openvino: bool) -> Any:
    """Return the run's answers of the stage that a library repeats, as that library gives them."""
    built = json.loads((run / "results.json").read_text())["engine"]
    own = openvino and built is not None and built["backend"] == "openvino"
    stage = "engine" if own and (run / "logits" / "engine.npz").is_file() else "onnxruntime"
    with np.load(run / "logits" / f"{stage}.npz") as saved:
        logits = saved[f"{session.config.task.eval_splits[0]}.logits"].astype(np.float64)[:ROWS]
    if session.config.task.kind.name != "classification":
        return stage, logits
    return stage, np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))


def as_array(found: Any, labels: list[str]) -> Any:
    """Return answers as [rows, columns], those of a classifier in the order of the labels."""
    if isinstance(found[0], list) and isinstance(found[0][0], dict):
        rows = ({each["label"]: each["score"] for each in row} for row in found)
        return np.array([[row[label] for label in labels] for row in rows])
    return np.array(found, dtype=np.float64).reshape(len(found), -1)


def compare(run: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield each library, what it gave, and whether these are the answers of the run."""
    session = Session(read_config(run), run)
    task = session.config.task
    kind = task.kind.name.partition(" of ")[0]
    split, _ = session.eval_splits[task.eval_splits[0]]
    columns = [split.dataset[name][:ROWS] for name in task.text_columns]
    texts = columns[0] if len(columns) == 1 else [*zip(*columns, strict=True)]
    labels = json.loads((run / "deploy" / "model.json").read_text())["labels"]
    for block in read_blocks(PAGE.read_text()):
        if KINDS[block.name] != kind:
            continue
        title = f"{block.library} ({block.environment})"
        answers = ask(block, run / "deploy", texts)
        if isinstance(answers, str):
            yield title, answers, False
            continue
        stage, known = known_answers(run, session, block.environment == "openvino")
        made = as_array(answers, labels)
        scale = {"classification": 1.0, "regression": known.std()}.get(kind, 1 / np.sqrt(known.shape[1]))
        apart = np.abs(made - known) / scale
        told = (
            f"stage {stage}, {len(known)} rows: mean difference {apart.mean():.4f}, largest {apart.max():.4f}"
        )
        if kind == "classification":
            told += f", {(made.argmax(1) != known.argmax(1)).sum()} other classes"
        mean, most = (OF_EMBEDDINGS if kind == "embedding" else TOLERANCE)[stage]
        yield title, told, bool(apart.mean() <= mean and apart.max() <= most)


def main() -> int:
    """Entry point."""
    right = True
    for run in map(Path, sys.argv[1:]):
        for library, told, same in compare(run):
            print(f"{'ok  ' if same else 'FAIL'} {run.name}: {library}: {told}", flush=True)
            right &= same
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
