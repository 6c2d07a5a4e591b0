"""What the INT8 softmax costs on long inputs: fake-quant accuracy and loss by length and form of the softmax.

    python tools/benchmark_long.py --model FOLDER --task mrpc --data FOLDER --out FOLDER

Texts are stretched: `repeat` says each text again until it fills its part of the length, which keeps its
label; `context` puts the same texts of other rows, drawn with seed 0, behind both sentences of a pair.
`--stretch-only` just writes the data, for `qdqbench run`. Prints what it finds, the loss by layer too, and
writes it to `long.json` and as a table to `long.md` in OUT. Uses a GPU if there is one.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

LENGTHS = (0, 128, 256, 384, 512)  # 0: as they are
RECIPE = "bert-int8-attention"
FORMS = ("fp16", "max", "error")  # of the attention; fp16: the linears alone are in INT8


def stretched(rows: pd.DataFrame, columns: list[str], words: int, how: str) -> pd.DataFrame:
    """The rows with `words` words or more in each text; the tokenizer cuts them to the length."""
    random, texts = np.random.default_rng(0), rows[columns[0]].tolist()
    made = rows.copy()
    for at in range(len(rows)):
        behind: list[str] = []
        while how == "context" and sum(len(text.split()) for text in behind) < words:
            behind.append(texts[random.integers(len(texts))])
        for column in columns:
            own = str(rows[column].iloc[at])
            times = 1 if behind else words // max(len(own.split()), 1) + 1
            made.iloc[at, made.columns.get_loc(column)] = " ".join([own] * times + behind)
    return made


def write_stretched(source: Path, task: str, columns: list[str], length: int, how: str, *, out: Path) -> None:
    """A data folder whose texts fill `length` tokens."""
    (out / task).mkdir(parents=True, exist_ok=True)
    for file in sorted((source / task).glob("*.parquet")):
        rows = pd.read_parquet(file)
        made = stretched(rows, columns, length, how) if length else rows
        made.to_parquet(out / task / file.name)


def measure(options: argparse.Namespace, data: Path, length: int, form: str) -> dict[str, Any]:
    """Accuracy and loss of one form on one length; the calibration rows may be of other lengths."""
    from qdqbench._options import EvaluationOptions
    from qdqbench.eval.metrics.compare import compare
    from qdqbench.eval.metrics.runners import evaluating, placed, predict, torch_runner
    from qdqbench.quantize.calibration import ptq
    from qdqbench.quantize.pipeline.session import Session
    from qdqbench.quantize.recipe.schema import Recipe, load_recipe
    from qdqbench.quantize.tasks import metrics

    recipe = load_recipe(options.recipe if form != "fp16" else options.without).model_dump(mode="json")
    recipe["calibration"] |= {"samples": options.samples, "softmax": form if form != "fp16" else "auto"}
    recipe["export"]["max_length"] = length or 128
    recipe["engine"]["shapes"] = {"batch": [1, 1, 1], "length": [16, 16, 16]}
    recipe = Recipe.model_validate(recipe)

    def session_on(folder: Path) -> Session:
        where = {"model": options.model, "task": options.task, "data": str(folder), "limit": options.limit}
        return Session(EvaluationOptions(**where).config(recipe, "benchmark_long"), data)

    session = session_on(data)
    (_, encoded) = next(iter(session.eval_splits.values()))

    def logits_of(model: Any) -> Any:
        with evaluating(model):
            run = torch_runner(model)
            return predict(run, encoded, pad_id=session.pad_id, batch_size=16, stage="study")

    known = data / "fp32.npy"
    if not known.is_file():
        np.save(known, logits_of(session.fp32_model))
    model = placed(session.new_int8_model())
    batches = session_on(Path(options.data) if options.calibrate_short else data).calibration_batches()
    record = ptq.calibrate(model, session.plan, batches, recipe.calibration)
    reference, logits = np.load(known), logits_of(model)
    found = compare(session.config.task, reference, logits, encoded.gold, seed=0)
    primary = session.config.task.metrics[0]
    centred = [part - part.mean(axis=1, keepdims=True) for part in (reference, logits)]
    return {
        "length": length,
        "form": form,
        "tokens": float(encoded.lengths.mean()),
        "calibrated_on": record.data["lengths"]["mean"],
        "metric": primary,
        "fp32": metrics.compute(session.config.task, reference, encoded.gold)[primary],
        "value": metrics.compute(session.config.task, logits, encoded.gold)[primary],
        "delta_stderr": found.delta_stderr[primary],
        "disagreements": found.disagreements,
        "n": encoded.rows,
        "logit_error": float(np.linalg.norm(centred[1] - centred[0]) / np.linalg.norm(centred[0])),
        "softmax": [row.model_dump() for row in record.softmax],
    }


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: a line for each length and form; the loss is that of the worst layer."""
    lines = [
        "| length | attention | metric | FP32 | INT8 | paired standard error | answers differ | error of the "
        "logits | worst layer: to zero | error of its output |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found:
        worst = max(row["softmax"], key=lambda loss: loss["error"], default=None)
        loss = f"{worst['zeroed']:.1%} | {worst['error']:.1%}" if worst else " | "
        metric = f"{row['metric']} | {row['fp32']:.4f} | {row['value']:.4f} | {row['delta_stderr']:.4f}"
        differ = f"{row['disagreements']} of {row['n']} | {row['logit_error']:.1%}"
        lines.append(f"| {row['tokens']:.0f} | {row['form']} | {metric} | {differ} | {loss} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "task", "data", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--how", choices=("repeat", "context"), default="repeat")
    parser.add_argument("--length", type=int, nargs="*", default=LENGTHS, help="tokens; 0: as they are")
    parser.add_argument("--form", nargs="*", default=FORMS)
    parser.add_argument("--samples", type=int, default=64, help="rows that calibrate")
    parser.add_argument("--limit", type=int, help="rows that are judged; none: all")
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--without", default="bert-int8-linears", help="the recipe without INT8 attention")
    parser.add_argument("--calibrate-short", action="store_true", help="calibrate on the texts as they are")
    parser.add_argument("--stretch-only", action="store_true")
    options = parser.parse_args()
    from qdqbench.quantize.tasks.task import get_task

    out, columns = Path(options.out), list(get_task(options.task).text_columns)
    found: list[dict[str, Any]] = []
    for length in options.length:
        data = out / f"{options.task}-{options.how}-{length}"
        write_stretched(Path(options.data), options.task, columns, length, options.how, out=data)
        for form in () if options.stretch_only else options.form:
            row = measure(options, data, length, form)
            found.append(row)
            print(
                f"{length:6} {form:6} {row['metric']} {row['value']:.4f} (FP32 {row['fp32']:.4f}, paired "
                f"standard error {row['delta_stderr']:.4f}) {row['disagreements']} of {row['n']} differ, "
                f"logits off by {row['logit_error']:.3f}",
                flush=True,
            )
            for loss in row["softmax"]:
                print(
                    f"       {loss['module']} to {loss['length']} tokens: amax {loss['amax']:.3f}"
                    f"{', centred' if loss['centered'] else ''}, zeroed {loss['zeroed']:.3f}, "
                    f"clipped {loss['clipped']:.3f}, output off by {loss['error']:.3f}",
                    flush=True,
                )
    if found:
        (out / "long.json").write_text(json.dumps(found, indent=1) + "\n")
        (out / "long.md").write_text(table(found))


if __name__ == "__main__":
    main()
