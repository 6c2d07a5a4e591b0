"""What `fix` makes of files that other tools wrote: INT8 GEMMs in the engine and accuracy, before and after.

    python tools/foreign.py --model MODEL --data DATA --out FOLDER
    python tools/try_fix.py FOLDER --model MODEL --data DATA --results docs/measured-foreign/sst2.json
    python tools/try_fix.py --markdown docs/measured-foreign/sst2.json   (its table)

DATA holds sst2/validation.parquet in the columns of `nyu-mll/glue`. Accuracy is ONNX Runtime's, whole split.
"""

import argparse
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, CALIBRATED = 64, ("ort-dynamic",)  # files whose activations need samples to have a scale
TITLES = {
    "ort-qdq": "ONNX Runtime `quantize_static`",
    "ort-qdq-uint8": "the same, UINT8, weights by channel",
    "ort-qoperator": "the same, QOperator",
    "ort-dynamic": "ONNX Runtime `quantize_dynamic`",
    "modelopt": "ModelOpt ONNX, INT8 max",
    "nncf": "NNCF on ONNX, transformer",
}


def validation(model: Path, data: Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tokens [872, L] padded to the longest, and labels."""
    import pandas
    from transformers import AutoTokenizer

    rows = pandas.read_parquet(data / "sst2" / "validation.parquet")
    tokenizer = AutoTokenizer.from_pretrained(model)
    made = tokenizer(
        rows["sentence"].tolist(), padding=True, truncation=True, max_length=LENGTH, return_tensors="np"
    )
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: made[name] for name in names}, rows["label"].to_numpy()


def accuracy(path: Path, feeds: dict[str, np.ndarray], labels: np.ndarray) -> float:
    """Of ONNX Runtime as `fix` runs it: without rewrites of its own."""
    from qdqbench.quantize.lint.runs import run_outputs

    logits = next(iter(run_outputs(path, feeds).values()))
    return float((logits.argmax(1) == labels).mean())


def measure(folder: Path, model: Path, data: Path, names: list[str]) -> dict[str, Any]:
    """One row a file: what `fix` reports, and accuracies."""
    from qdqbench.quantize.lint.fix import FixOptions, fix

    sys.path.insert(0, str(Path(__file__).parent))
    import foreign

    feeds, labels = validation(model, data)
    batches = foreign.calibration(model, data)
    samples = folder / "calibration.npz"
    np.savez(samples, **{k: np.concatenate([foreign._padded(b[k]) for b in batches]) for k in batches[0]})
    rows: dict[str, Any] = {"fp32": {"accuracy": accuracy(folder / "fp32.onnx", feeds, labels)}}
    for name in names:
        path, out = folder / f"{name}.onnx", folder / f"{name}.fixed.onnx"
        report = fix(path, out, FixOptions(inputs=samples if name in CALIBRATED else None))
        rows[name] = {
            "report": report.model_dump(mode="json"),
            "accuracy_before": accuracy(path, feeds, labels),
            "accuracy_after": accuracy(out, feeds, labels),
            "bytes_before": path.stat().st_size,
            "bytes_after": out.stat().st_size,
        }
        sys.stdout.write(f"{name} {rows[name]['accuracy_before']:.4f} {rows[name]['accuracy_after']:.4f}\n")
    return rows


def versions() -> dict[str, str]:
    wanted = ("onnxruntime", "onnx", "nvidia-modelopt", "nncf", "torch", "transformers", "tensorrt-rtx-cu13")
    return {name: found for name in wanted if (found := _version(name))} | {"cpu": platform.machine()}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def markdown(results: dict[str, Any]) -> str:
    """The table."""
    rows = results["rows"]
    lines = [
        "| made by | INT8 linears in the engine, before | after | attentions fused (INT8), after | "
        "accuracy before | after |",
        "|---|---|---|---|---|---|",
        f"| FP32 export | - | - | - | {rows['fp32']['accuracy']:.4f} | - |",
    ]
    for name, row in rows.items():
        if name == "fp32":
            continue
        first, second = row["report"]["engine_before"], row["report"]["engine_after"]
        lines.append(
            f"| {TITLES[name]} | {_gemms(first)} | {_gemms(second)} | {_attentions(second)} | "
            f"{row['accuracy_before']:.4f} | {row['accuracy_after']:.4f} |"
        )
    return "\n".join(lines)


def _gemms(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not built"
    return "refused" if row["refused"] else f"{row['int8_gemms']} of {row['gemms']}"


def _attentions(row: dict[str, Any] | None) -> str:
    if row is None or row["refused"]:
        return "-"
    return f"{row['attention_fused']} of {row['attentions']} ({row['attention_int8']})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only", nargs="*", default=list(TITLES))
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    if asked.markdown:
        sys.stdout.write(markdown(json.loads(asked.markdown.read_text())) + "\n")
        return
    known = json.loads(asked.results.read_text())["rows"] if asked.results.exists() else {}
    rows = known | measure(asked.folder, asked.model, asked.data, asked.only)
    made = {"model": asked.model.name, "task": "sst2", "n": 872, "versions": versions(), "rows": rows}
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    asked.results.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
