"""How numbers, names and text are written in reports."""

import html
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from qdqbench.quantize.utils.names import SECOND
from qdqbench.quantize.utils.schema import Schema

LABELS = {
    "ptq": "PTQ fake-quant",
    "reconstructed": "reconstructed fake-quant",
    "fake_quant": "fake-quant",
    "onnxruntime": "ONNX Runtime",
    "tensorrt": "TensorRT",
    "tensorrt_rtx": "TensorRT-RTX",
    "cuda": "CUDA kernels",
    "openvino": "OpenVINO",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "cosine": "cosine to FP32",
    "cosine_p1": "1st percentile of cosine",
    "neighbors": "neighbors kept",
    "cola": "CoLA",
    "sst2": "SST-2",
    "stsb": "STS-B",
} | {
    name: name.upper()
    for name in ["fp32", "qat", "f1", "mrr@10", "ndcg@10", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"]
}

# What garbles a terminal or a page, or cannot be encoded: controls, direction overrides, lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


DECIDES_ACCURACY = ("torch", "transformers", "nvidia-modelopt")


def label(name: str) -> str:
    if name.endswith(SECOND):
        return f"{label(name.removesuffix(SECOND))} (mismatched)"
    return LABELS.get(name, name.replace("_", " "))


def task_label(name: str) -> str:
    return "built-in task" if name == "embedded" else label(name)


def model_label(name: str) -> str:
    path = Path(name)
    return "built-in BERT" if path.parts[-2:] == ("embedded", "model") else path.name or name


def points(fraction: float) -> str:
    """Return a drop of a metric in words: 0.01 is `1 point`."""
    return f"{100 * fraction:g} point{'' if round(100 * fraction, 9) == 1 else 's'}"


def with_error(value: float, error: float | None, form: str = ".4f") -> str:
    """Return a number with its error, if there is one: 0.8968 ± 0.0103."""
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form.lstrip('+')}}")


def in_points(value: float, error: float | None, sign: str = "") -> str:
    """Return a fraction and its error, if there is one, in points: 92.55 ± 1.03."""
    return with_error(100 * value, None if error is None else 100 * error, f"{sign}.2f")


def delta_points(delta: float, error: float) -> str:
    """Return a difference, or a drop, with its standard error in points: +0.34 ± 0.52."""
    return in_points(delta + 0.0, error, "+")


def versions_text(environment: dict[str, Any], names: Sequence[str] = DECIDES_ACCURACY) -> str:
    """Return versions of libraries: torch 2.11.0, transformers 5.17.0, nvidia-modelopt 0.47.0."""
    known = environment.get("versions", {})
    return ", ".join(f"{name} {known[name]}" for name in names if name in known)


def size(count: float) -> str:
    """Return bytes in decimal units with three digits: 90.9 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def seconds(count: float) -> str:
    """Return seconds with the digits that matter: 0.24 s, 12.3 s, 4 min 05 s."""
    if count >= 119.5:
        return f"{round(count) // 60} min {round(count) % 60:02d} s"
    return f"{count:.2f} s" if count < 9.995 else f"{count:.1f} s"


def types(names: list[str]) -> str:
    """Return datatypes with their number: `3 FP16, INT8`."""
    counted = Counter(datatype(name) for name in names)
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in counted.items())


def inline(value: Any) -> str:
    """Return any text as Markdown that stays text within a line or a table."""
    line = " ".join(str(value).split())
    return html.escape(re.sub(r"([\\`*\[\]|~])", r"\\\1", line), quote=False)


def text(value: Any) -> str:
    """Return any text as one line of Markdown that stays text."""
    return re.sub(r"^([#+=-])", r"\\\1", inline(value))


def ticked(value: Any) -> str:
    """Return any text as HTML, in which what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(str(value)))


def code(value: Any) -> str:
    """Return any text as one Markdown code span, in a table too."""
    line = " ".join(str(value).split()).replace("`", "'").replace("|", r"\|")
    return f"`{line}`" if line else ""


def fenced(block: str, language: str = "") -> str:
    """Return a Markdown code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", block)), default=0))
    return f"{fence}{language}\n{block.rstrip()}\n{fence}"


def flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        start = f"{prefix}." if prefix else ""
        return [row for key, item in value.items() for row in flat(item, f"{start}{key}")]
    if isinstance(value, list):
        return [(prefix, ", ".join(str(item) for item in value))]
    if isinstance(value, int) and value >= 100_000:
        return [(prefix, f"{value:,}")]
    return [(prefix, "none" if value is None else str(value))]


def sentence(line: str) -> str:
    return line if line.endswith((".", "!", "?")) else f"{line}."


def first(lines: Sequence[str], count: int, where: str) -> list[str]:
    rest = len(lines) - count
    return [*lines] if rest <= 0 else [*lines[:count], f"and {rest} more in {where}"]


def yaml_text(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100))


def clean(value: Any) -> Any:
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    return value


def cleaned(record: Schema) -> Schema:
    """Return a record whose strings hold nothing that garbles a page or a terminal."""
    return type(record).model_validate(clean(record.model_dump(mode="json")))


DATATYPES = {"half": "FP16", "float": "FP32", "bfloat16": "BF16"} | {
    name: name.upper() for name in ("int8", "uint8", "fp8", "int32", "int64")
}


def datatype(name: str) -> str:
    return DATATYPES.get(name.lower(), name)


def known(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def finite(value: float | None, form: str = ".3g") -> str:
    """Return a number with three digits; None is one that is not finite."""
    return known(value, form) or "not a number"
