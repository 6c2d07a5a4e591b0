"""Accuracy and amax over draws of calibration rows: how many rows are enough, and of which texts.

    python -m tools.real_size.draws MODEL sst2 --data GLUE --rows 64 512 --seeds 10 --out draws.json

Each draw calibrates MODEL anew and evaluates its fake-quant model on the validation split. With --texts the
rows are those of another task's train split. A row of the result is written as soon as it is there. At the
end a Markdown table of docs/how-to/compare-calibration.md is printed.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from scipy.stats import spearmanr
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import qdqbench
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.utils.system.environment import describe_environment

MAX_LENGTH, BATCH = 128, 64


def read_rows(data: Path, task: str, split: str) -> list[dict[str, Any]]:
    """Return rows of a GLUE-style folder."""
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(data / task / f"{split}.parquet").to_pylist()
    return rows


def tokenize(tokenizer: Any, task: str, rows: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """Return the samples of rows, cut at 128 tokens."""
    columns = GLUE[task].text_columns
    texts = [[row[column] for row in rows] for column in columns]
    tokens = tokenizer(*texts, truncation=True, max_length=MAX_LENGTH)
    return [{name: values[index] for name, values in tokens.items()} for index in range(len(rows))]


@torch.inference_mode()
def predict(model: Any, tokenizer: Any, samples: list[dict[str, list[int]]]) -> np.ndarray:
    """Return the class of each sample, in batches by length."""
    order = sorted(range(len(samples)), key=lambda index: len(samples[index]["input_ids"]))
    classes = np.empty(len(samples), int)
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        batch = tokenizer.pad([samples[index] for index in part], return_tensors="pt").to(model.device)
        classes[part] = model(**batch).logits.argmax(1).cpu().numpy()
    return classes


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Calibrate and evaluate each draw."""
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        given.model, attn_implementation="eager"
    ).eval()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    judged = read_rows(given.data, given.task, "validation")
    samples, gold = tokenize(tokenizer, given.task, judged), np.array([row["label"] for row in judged])
    source = given.texts or given.task
    drawn = tokenize(tokenizer, source, read_rows(given.data, source, "train")[: given.most])
    before = predict(model, tokenizer, samples)
    for rows in given.rows:
        for seed in range(given.seeds):
            chosen = np.random.default_rng(seed).permutation(len(drawn))[:rows]
            quantized = qdqbench.quantize(model, [drawn[index] for index in chosen], given.recipe)
            after = predict(quantized.model, tokenizer, samples)
            table = quantized.to_frame()
            inputs = table[table.kind == "input"].set_index("module")[["amax", "amax_spread"]].dropna()
            yield {
                "task": given.task,
                "texts": source,
                "rows": len(chosen),
                "seed": seed,
                "n": len(gold),
                "fp32": float((before == gold).mean()),
                "fake_quant": float((after == gold).mean()),
                "changed": int((before != after).sum()),
                **inputs.map(lambda value: float(f"{value:.5g}")).to_dict(),
            }


def summarize(draws: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown row for each number of rows and source of texts.

    The rank correlation is that of a draw's spread with the variation of amax over all draws; the mean over
    draws.
    """
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for draw in draws:
        groups.setdefault((draw["rows"], draw["texts"]), []).append(draw)
    for (rows, texts), found in groups.items():
        names = sorted(set[str].intersection(*(set(draw["amax"]) for draw in found)))
        if len(found) < 2 or not names:
            continue
        accuracy, changed = [draw["fake_quant"] for draw in found], [draw["changed"] for draw in found]
        amax, spread = (
            np.array([[draw[key][name] for name in names] for draw in found])
            for key in ("amax", "amax_spread")
        )
        varies = amax.std(axis=0, ddof=1) / amax.mean(axis=0)
        agrees = np.mean([spearmanr(one, varies).statistic for one in spread])
        cells = (
            f"{rows:,} of {texts}",
            f"{np.mean(accuracy):.4f} ± {np.std(accuracy, ddof=1):.4f}",
            f"{min(changed)} to {max(changed)}",
            f"{np.median(varies):.1%}, {varies.max():.0%}",
            f"{np.median(spread):.1%}, {spread.max():.0%}",
            f"{agrees:.2f}",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Write all draws of a model as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", default="bert-int8-residual-fused")
    parser.add_argument("--texts", help="task whose train split gives the rows (default: the same)")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 512, 1024, 4096])
    parser.add_argument("--most", type=int, default=65536, help="rows of the train split to draw from")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=86400, help="limit, after which no draw begins")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    begun, draws = time.monotonic(), list[dict[str, Any]]()
    record = {"model": Path(given.model).name, "recipe": given.recipe, "environment": describe_environment()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for draw in measure(given):
        draws.append(draw)
        given.out.write_text(json.dumps(record | {"draws": draws}, indent=1) + "\n", encoding="utf-8")
        seen = f"{draw['rows']} rows of {draw['texts']}, seed {draw['seed']}: {draw['fake_quant']:.4f}"
        print(f"{time.monotonic() - begun:5.0f} s: {seen} (FP32 {draw['fp32']:.4f})", flush=True)
        if time.monotonic() - begun > given.seconds:
            break
    print(*summarize(draws), sep="\n")


if __name__ == "__main__":
    main()
