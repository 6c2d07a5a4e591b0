"""Quantized ONNX files as other tools write them: an FP32 export, and what each tool makes of it.

Each tool is called as its own documentation shows, with its defaults; 128 training rows calibrate.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS, BATCH, LENGTH, OPSET = 128, 16, 64, 17
Feeds = dict[str, np.ndarray]


def export_fp32(model: Path, out: Path) -> None:
    """As most exports are made: transformers' eager attention, mask of -3.4e38, dynamic batch and length."""
    import torch
    from transformers import AutoModelForSequenceClassification

    loaded = AutoModelForSequenceClassification.from_pretrained(
        model, attn_implementation="eager", dtype=torch.float32
    ).eval()
    ids = torch.ones(2, 16, dtype=torch.long)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    torch.onnx.export(
        loaded,
        (ids, ids, ids),
        str(out),
        input_names=names,
        output_names=["logits"],
        dynamic_axes={name: {0: "batch", 1: "length"} for name in names} | {"logits": {0: "batch"}},
        opset_version=OPSET,
        dynamo=False,
    )


def calibration(model: Path, data: Path, task: str = "sst2") -> list[Feeds]:
    """Batches of the first training rows, padded to the longest of each and cut at LENGTH tokens."""
    import pandas
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = pandas.read_parquet(data / task / "train.parquet")["sentence"].tolist()[:ROWS]
    batches = []
    for start in range(0, ROWS, BATCH):
        made = tokenizer(
            texts[start : start + BATCH],
            padding=True,
            truncation=True,
            max_length=LENGTH,
            return_tensors="np",
        )
        batches.append({name: made[name] for name in ("input_ids", "attention_mask", "token_type_ids")})
    return batches


class _Reader:
    """What onnxruntime.quantization calls a CalibrationDataReader."""

    def __init__(self, batches: list[Feeds]) -> None:
        self.batches: Iterator[Feeds] = iter(batches)

    def get_next(self) -> Feeds | None:
        return next(self.batches, None)


def _static(fp32: Path, out: Path, batches: list[Feeds], **options: Any) -> None:
    from onnxruntime import quantization

    quantization.quantize_static(str(fp32), str(out), _Reader(batches), **options)


def ort_qdq(fp32: Path, out: Path, batches: list[Feeds]) -> None:
    """`quantize_static` as it comes: INT8 with zero points, every operator."""
    _static(fp32, out, batches)


def ort_qdq_uint8(fp32: Path, out: Path, batches: list[Feeds]) -> None:
    """As it is used for CPUs: UINT8 activations, INT8 weights by channel."""
    from onnxruntime.quantization import QuantType

    _static(fp32, out, batches, activation_type=QuantType.QUInt8, per_channel=True)


def ort_qoperator(fp32: Path, out: Path, batches: list[Feeds]) -> None:
    """`quantize_static` in the operator format."""
    from onnxruntime.quantization import QuantFormat, QuantType

    _static(fp32, out, batches, quant_format=QuantFormat.QOperator, activation_type=QuantType.QUInt8)


def ort_dynamic(fp32: Path, out: Path, batches: list[Feeds]) -> None:
    """`quantize_dynamic` as it comes."""
    from onnxruntime import quantization

    quantization.quantize_dynamic(str(fp32), str(out))


def modelopt(fp32: Path, out: Path, batches: list[Feeds]) -> None:
    """`modelopt.onnx.quantization.quantize` in INT8, max calibration, with its own FP16 conversion."""
    from modelopt.onnx.quantization import quantize

    whole = {name: np.concatenate([_padded(batch[name]) for batch in batches]) for name in batches[0]}
    quantize(
        str(fp32),
        quantize_mode="int8",
        calibration_data=whole,
        calibration_method="max",
        calibration_eps=["cpu"],
        output_path=str(out),
    )


def _padded(array: np.ndarray) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, LENGTH - array.shape[1])))


def nncf(fp32: Path, out: Path, batches: list[Feeds]) -> None:
    """`nncf.quantize` of the ONNX model with the preset for transformers."""
    import nncf as library
    import onnx

    made = library.quantize(
        onnx.load(str(fp32)),
        library.Dataset(batches),
        model_type=library.ModelType.TRANSFORMER,
        subset_size=len(batches),
    )
    onnx.save(made, str(out))


TOOLS: dict[str, Callable[[Path, Path, list[Feeds]], None]] = {
    "ort-qdq": ort_qdq,
    "ort-qdq-uint8": ort_qdq_uint8,
    "ort-qoperator": ort_qoperator,
    "ort-dynamic": ort_dynamic,
    "modelopt": modelopt,
    "nncf": nncf,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2/train.parquet")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("tools", nargs="*", default=list(TOOLS))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    fp32 = asked.out / "fp32.onnx"
    if not fp32.exists():
        export_fp32(asked.model, fp32)
    batches = calibration(asked.model, asked.data)
    for name in asked.tools:
        out = asked.out / f"{name}.onnx"
        if not out.exists():
            TOOLS[name](fp32, out, batches)
        sys.stdout.write(f"{out} {out.stat().st_size}\n")


if __name__ == "__main__":
    main()
