"""The figures of `check` in sentences."""

from collections import Counter

from qdqbench.quantize.check.check import CheckReport
from qdqbench.quantize.core.names import count_of


def summary(report: CheckReport) -> list[str]:
    """What TensorRT would run of the file, its attentions, and how many findings there are."""
    return [_gemms(report), *_attentions(report), _findings(report)]


def _gemms(report: CheckReport) -> str:
    counts = report.counts
    if not report.gemms:
        return "no matrix products were looked into"
    refused = Counter(row.operator for row in report.gemms if row.state == "refused")
    parts = [
        f"{counts['refused']} in INT8 that it refuses ({_operators(refused)})" if refused else "",
        f"{counts['not_int8']} with Q/DQ that make no INT8 kernel" if counts["not_int8"] else "",
        f"{counts['floating_point']} in floating point" if counts["floating_point"] else "",
    ]
    if report.refusals:
        taken = sum(row.state == "INT8" for row in report.gemms)
        parts.insert(1, f"{taken} in INT8 that it takes" if taken else "")
        of_all = f"; of {count_of(counts['gemms'], 'GEMM')}, {', '.join(filter(None, parts))}"
        return f"TensorRT refuses this file, so none of it runs in INT8{of_all}"
    rest = f"; {', '.join(filter(None, parts))}" if any(parts) else ""
    return f"{counts['int8']} of {count_of(counts['gemms'], 'GEMM')} run in INT8{rest}"


def _operators(refused: Counter[str]) -> str:
    return ", ".join(f"{count} {operator}" for operator, count in refused.most_common())


def _attentions(report: CheckReport) -> list[str]:
    whole, rest = len(report.attention_quantized), len(report.attention_not_quantized)
    if not whole or report.refusals:
        return []
    return [f"{whole} of {count_of(whole + rest, 'attention')} in INT8 as a whole"]


def _findings(report: CheckReport) -> str:
    counts = report.counts
    if not counts["findings"]:
        return "no findings"
    kinds = count_of(len(report.groups), "kind")
    errors = count_of(counts["errors"], "error")
    refusals = f", {counts['refusals']} of them refusals" if counts["refusals"] else ""
    return f"{count_of(counts['findings'], 'finding')} of {kinds}: {errors}{refusals}"
