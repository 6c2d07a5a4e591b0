"""Sizes of a run: the engine beside those without INT8, and the ONNX files that engines are built from."""

from qdqbench.eval.report.formats import size
from qdqbench.eval.runreport.verdict import quantized_file
from qdqbench.quantize.core.results import Results

Tile = tuple[str, str, str, bool]


def tiles(results: Results) -> list[Tile]:
    """What is deployed, against the same in FP16 and FP32; and the ONNX file."""
    found: list[Tile] = []
    if (engine := results.engine) is not None:
        twins = [f"{row.precision.upper()} {size(row.bytes)}" for row in results.twins]
        found.append(
            ("engine", size(engine.bytes), ", ".join(filter(None, [*twins, missing(results)])), True)
        )
    if (shrunk := quantized_file(results)) is not None:
        found.append(("ONNX file against FP32", f"{shrunk[1]:.2f}", f"{size(shrunk[2])}, {shrunk[0]}", True))
    return found


def rows(results: Results) -> list[tuple[str, int, str, float | None]]:
    """File or engine, bytes, what it is, and its size by that of the same in FP32, where that is known."""
    found = [(row.name, row.bytes, "ONNX", row.fp32_ratio) for row in results.files]
    full = next((row.bytes for row in results.twins if row.precision == "fp32"), None)
    if (engine := results.engine) is not None:
        found.append((engine.file, engine.bytes, "engine of this run", engine.bytes / full if full else None))
    for row in results.twins:
        found.append((row.name, row.bytes, "engine of the bench", row.bytes / full if full else None))
    if (gpu := results.gpu_engine) is not None:
        found.append((f"gpu/engine/{gpu.file}", gpu.bytes, "engine for GPUs, built ahead of time", None))
    return found


def missing(results: Results) -> str:
    """Which engines there are none of to compare with, and what builds them; empty where nothing lacks.

    A bench on a CPU compiles the others in memory, so there are no files of them to wait for.
    """
    if results.engine is None or results.engine.on_cpu:
        return ""
    there = {row.precision for row in results.twins}
    lacking = [precision.upper() for precision in ("fp16", "fp32") if precision not in there]
    return f"{' and '.join(lacking)} not built: `qdqbench bench RUN` builds them" if lacking else ""
