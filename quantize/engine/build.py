"""Build an engine from files, prove from its layer table what runs in INT8, and write its sidecar."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from qdqbench.quantize.engine import layers as tables
from qdqbench.quantize.engine.backend import Backend, BuildProgress, BuiltEngine, build_engine, choose_backend
from qdqbench.quantize.engine.cpu_runtimes import (
    STREAM_ROWS,
    CompiledModel,
    Compute,
    choose_streams,
    compile_model,
    name_products,
    warm_up,
)
from qdqbench.quantize.engine.cuda.file import build_file
from qdqbench.quantize.engine.cuda.names import read_target
from qdqbench.quantize.engine.cuda.tokens import MOST_TOKENS
from qdqbench.quantize.engine.hazards import find_hazards
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.engine.sidecar import Sidecar, sidecar_path
from qdqbench.quantize.graph.index import (
    MATMULS,
    GraphIndex,
    attribute,
    list_int8_norms,
    prune,
    replace_nodes,
)
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.report.coverage import fused_attentions, share, uncovered
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Int8
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.limits import (
    CPU_BACKENDS,
    HEAD_SIZES_TEXT,
    INT8_ATTENTION_LENGTH,
    BackendChoice,
    BackendName,
    has_profiles,
)
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.system.cpu import cpu_hazards, find_cpu


def build(  # noqa: PLR0913  all but the two files are keywords
    onnx_path: Path,
    engine_path: Path,
    *,
    backend: BackendChoice,
    profiles: Sequence[Profile],
    expected_gemms: Collection[str],
    expected_attention: int,
    compute_capability: str | Sequence[str] | None = None,
    strict: bool = True,
    layers_path: Path | None = None,
    timing_cache: Path | None = None,
    compute: Compute = "fp32",
    times_streams: bool = False,
    note: Callable[[str], None] = lambda _: None,  # gets what the user must hear
    progress: BuildProgress | None = None,
) -> EngineResult:
    """Build `engine_path` from `onnx_path` and report which GEMMs, attentions and residuals run in INT8.

    The graph is strongly typed, with [batch, length] inputs; its residuals with Q/DQ must be INT8. Writes the
    engine, then its layer table (`layers_path`, by default layers.json next to the engine), then the sidecar.
    A failing proof is in the result, not raised: see `require_int8`. What is refused raises UserError, a
    backend or GPU that is not there MissingDevice; nothing is written then.

    Args:
        compute_capability: target such as "8.9", or several for backend cuda; None for the GPU at hand or the
            default.
        strict: an engine whose layer table cannot be read is an error, not a result that proves nothing.
        compute: datatype of what is not quantized (CPU runtimes only; a graph for TensorRT says it itself).
        times_streams: find the fastest number of streams on a CPU, for files; it takes a second or two.
    """
    chosen = choose_backend(backend)
    wanted = list_targets(chosen.name, compute_capability)
    model = read_model(onnx_path)
    _check_names(onnx_path, _gemms(model), expected_gemms)
    if chosen.name in CPU_BACKENDS:
        built = _build_for_cpu(onnx_path, chosen, profiles, compute, times_streams=times_streams)
        name_products(built.layers, model)
    elif chosen.name == "cuda":
        built = _build_kernels(model, chosen, profiles, wanted)
    else:
        joined = merge_qkv_gemms(model)
        built = build_engine(
            onnx_path,
            chosen,
            profiles,
            graph=None if joined is None else joined.SerializeToString(),
            compute_capability=wanted[0] if wanted else None,
            timing_cache=timing_cache,
            progress=progress,
        )
    hazards = (
        text for each in built.compute_capability for text in find_hazards(built.backend, built.version, each)
    )
    for text in (*hazards, *built.notes):
        note(text)
    if strict and not built.layers:
        raise UserError(
            f"{built.backend} {built.version} shows no layer table for {onnx_path}, so nothing proves what "
            "runs in INT8; use a version that qdqbench supports"
        )
    result = _prove(built, model, engine_path.name, expected_gemms, expected_attention)
    files.write_bytes(engine_path, built.data)
    layers = {"layers": [row.model_dump() for row in built.layers]}
    files.write_json(layers_path or engine_path.with_name("layers.json"), layers)
    # the sidecar comes last, because it vouches for the engine
    gpu = chosen.gpu if has_profiles(chosen.name) else None
    cpu = find_cpu() if chosen.name in CPU_BACKENDS else None
    sidecar = Sidecar(
        qdqbench=metadata.version("qdqbench"),
        backend=built.backend,
        version=built.version,
        compute_capability=built.compute_capability,
        ahead_of_time=built.ahead_of_time,
        gpu=gpu.name if gpu else None,
        driver=gpu.driver if gpu else None,
        cpu=cpu.name if cpu else None,
        cpu_features=[*cpu.features] if cpu else [],
        compute=compute if cpu else None,
        streams=built.streams,
        profiles=list(profiles),
        onnx=onnx_path.name,
        onnx_sha256=files.sha256(onnx_path),
        engine_bytes=len(built.data),
        engine_sha256=files.sha256(engine_path),
        build_seconds=round(built.seconds, 3),
    )
    files.write_json(sidecar_path(engine_path), sidecar.model_dump())
    return result


def list_targets(backend: BackendName, wanted: str | Sequence[str] | None) -> list[str]:
    """Return the GPUs that an engine is wanted for; UserError where the backend does not build for them."""
    names = [wanted] if isinstance(wanted, str) else [*(wanted or ())]
    if backend == "cuda":
        return [read_target(name).name for name in names]
    if len(names) > 1:
        raise UserError(f"{backend} builds for one GPU at a time, not for {', '.join(names)}; name one")
    return names


def _prove(
    built: BuiltEngine, model: onnx.ModelProto, file: str, expected_gemms: Collection[str], attentions: int
) -> EngineResult:
    """Compare the layer table with what must be in INT8."""
    residuals = list_int8_norms(model)
    proof = tables.measure_coverage(built.layers, expected_gemms, _gemms(model))
    lost = tables.float_residuals(built.layers, residuals)
    one, copies = tables.select_profile(built.layers)
    # a CPU runtime may run the two products of an attention in kernels of their own
    in_products = proof.int8_products // 2 if built.backend in CPU_BACKENDS else 0
    return EngineResult(
        backend=built.backend,
        version=built.version,
        compute_capability=built.compute_capability,
        ahead_of_time=built.ahead_of_time,
        file=file,
        bytes=len(built.data),
        int8_gemms=len(proof.int8_gemms),
        expected_int8_gemms=len(set(expected_gemms)),
        not_int8=proof.not_int8,
        attention_fused=proof.attention_fused,
        attention_int8=proof.attention_int8 + in_products,
        expected_attention_int8=attentions,
        int8_residuals=len(residuals) - len(lost),
        expected_int8_residuals=len(residuals),
        not_int8_residuals=lost,
        profiles=copies,
        kernels=len(one),
        layers=built.layers,
    )


def _build_for_cpu(
    onnx_path: Path, chosen: Backend, profiles: Sequence[Profile], compute: Compute, *, times_streams: bool
) -> BuiltEngine:
    started = time.perf_counter()
    sizes = ({end[axis] for each in profiles for end in (each.min, each.max)} for axis in (0, 1))
    batch, length = (next(iter(known)) if len(known) == 1 else None for known in sizes)
    data = onnx_path.read_bytes()
    report_phase("compiling")
    model = compile_model(chosen.name, data, blob=False, compute=compute, fixed=(batch, length))
    warm_up(model, profiles[0].opt)
    blob, cores = model.blob(), find_cpu().cores
    shape = min(STREAM_ROWS, max(each.max[0] for each in profiles)), profiles[0].opt[1]

    def open_model(streams: int) -> CompiledModel:
        return compile_model(chosen.name, blob, blob=True, compute=compute, threads=cores, streams=streams)

    return BuiltEngine(
        data=blob,
        streams=choose_streams(open_model, shape, cores) if times_streams else 1,
        layers=[kernel.row for kernel in model.kernels()],
        backend=chosen.name,
        version=chosen.version,
        compute_capability=[],
        ahead_of_time=False,
        seconds=time.perf_counter() - started,
        notes=cpu_hazards(find_cpu()),
    )


def _build_kernels(
    model: onnx.ModelProto, chosen: Backend, profiles: Sequence[Profile], wanted: Sequence[str]
) -> BuiltEngine:
    if large := [each for each in profiles if each.max[0] * each.max[1] > MOST_TOKENS]:
        raise UserError(
            f"backend cuda takes {MOST_TOKENS} tokens at once, and engine.shapes {large[0]} has more; "
            "lower its largest batch"
        )
    report_phase("compiling")
    here = chosen.gpu.compute_capability if chosen.gpu else None
    data, layers, targets, seconds = build_file(model, wanted, here)
    return BuiltEngine(
        data=data,
        layers=layers,
        backend=chosen.name,
        version=chosen.version,
        compute_capability=targets,
        ahead_of_time=True,
        seconds=seconds,
        notes=find_hazards(chosen.name, chosen.version, here),
    )


def list_gemms(onnx_path: Path) -> list[str]:
    return _gemms(read_model(onnx_path))


def _gemms(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in model.graph.node if node.op_type in MATMULS]


def require_int8(result: EngineResult) -> None:
    """Raise CheckFailed where a GEMM, an attention or a residual is not INT8; it lists every one and why."""
    problems = []
    if result.not_int8:
        reasons: dict[tables.NotInt8, list[str]] = {}
        for node in result.not_int8:
            reasons.setdefault(tables.why_not(result.layers, node), []).append(node)
        listed = "; ".join(f"{', '.join(nodes)}: {why}" for why, nodes in reasons.items())
        problems.append(
            f"{uncovered(len(result.not_int8))} ({listed}); "
            "run `qdqbench check` on the ONNX file for the Q/DQ at fault"
        )
    if result.attention_int8 < result.expected_attention_int8:
        problems.append(
            f"{fused_attentions(result.attention_int8, result.expected_attention_int8)} "
            f"({result.attention_fused} are fused at all). It takes Q/DQ on q, k, v, the softmax and the "
            f"output, head size {HEAD_SIZES_TEXT} and at most {INT8_ATTENTION_LENGTH} tokens; "
            "else set attention: fp16 in the recipe"
        )
    if result.not_int8_residuals:
        lost = share(len(result.not_int8_residuals), result.expected_int8_residuals)
        lost = f"{lost} LayerNorms do not read their INT8 residual as INT8"
        problems.append(
            f"{lost}, which no runtime for CPUs does; on a CPU take a recipe without residual: int8"
            if result.on_cpu
            else f"{lost} ({', '.join(result.not_int8_residuals)}); run `qdqbench check` for residuals with "
            "a scale of their own, or set residual: fp16 in the recipe"
        )
    if problems:
        raise CheckFailed(f"{result.file}: {'; and '.join(problems)}")


def _check_names(path: Path, gemms: list[str], expected: Collection[str]) -> None:
    """Require names to exist and be unique, or the layer table proves nothing."""
    counts = Counter(gemms)
    if missing := sorted(set(expected) - set(counts)):
        raise UserError(f"{path} has no MatMul or Gemm named {', '.join(missing)}; export the model again")
    if repeated := sorted(name for name in set(expected) if counts[name] > 1 or not name):
        names = ", ".join(map(repr, repeated))
        raise UserError(f"{path} has several MatMul or Gemm nodes named {names}; give each node its own name")


TOGETHER = "+"  # between the names of nodes that became one, as TensorRT writes it too


@dataclass(frozen=True)
class _LinearNodes:
    node: onnx.NodeProto
    weight: onnx.NodeProto  # DQ
    codes: Int8
    same: tuple[str, float, float]  # tensor that is quantized, its scale, and that of the weight


def merge_qkv_gemms(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the graph with one MatMul for linears of the same codes and one scale that end in one Concat.

    Names of nodes are joined by `TOGETHER`; no value changes, as integer sums are exact, nor does `model`.
    """
    index = GraphIndex(model)
    if not any(_group(index, node) for node in model.graph.node):
        return None
    merged_model = onnx.ModelProto()
    merged_model.CopyFrom(model)
    index = GraphIndex(merged_model)
    dropped: set[int] = set()
    for concat in merged_model.graph.node:
        if not (group := _group(index, concat)):
            continue
        first, *others = group
        codes = np.concatenate([first.codes, *(linear.codes for linear in others)])
        name = f"{first.weight.input[0]}_joined"
        merged_model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(codes), name))
        first.weight.input[0] = name
        first.node.name = TOGETHER.join([first.node.name, *(linear.node.name for linear in others)])
        first.node.output[0] = concat.output[0]
        dropped |= {id(concat), *(id(linear.node) for linear in others)}
    replace_nodes(merged_model, (node for node in merged_model.graph.node if id(node) not in dropped))
    prune(merged_model)
    return merged_model


def _group(index: GraphIndex, concat: onnx.NodeProto) -> list[_LinearNodes]:
    """Return the linears whose results a Concat joins, if one MatMul can make them; else none."""
    if concat.op_type != "Concat" or attribute(concat, "axis") not in (2, -1):
        return []
    if any(value.name in concat.input for value in index.graph.output):  # a bisection looks at one alone
        return []
    found = [_linear(index, name) for name in concat.input]
    linears = [linear for linear in found if linear is not None]
    alike = len(linears) == len(found) > 1 and len({linear.same for linear in linears}) == 1
    return linears if alike and len({id(linear.node) for linear in linears}) == len(linears) else []


def _linear(index: GraphIndex, product: str) -> _LinearNodes | None:
    node = index.producers.get(product)
    if node is None or node.op_type != "MatMul" or len(index.consumers.get(product, [])) != 1:
        return None
    read, _ = index.origin(node.input[0], ("Cast",))
    turned, _ = index.origin(node.input[1], ("Cast",))
    if turned is None or turned.op_type != "Transpose":  # rows of [K, N] are not those of results
        return None
    weight, _ = index.origin(turned.input[0], ("Cast",))
    if read is None or weight is None or {read.op_type, weight.op_type} != {"DequantizeLinear"}:
        return None
    quantizer, codes = index.producers.get(read.input[0]), index.constant(weight.input[0])
    scales = [index.constant(dq.input[1]) for dq in (read, weight)]
    numbers = [float(scale) for scale in scales if scale is not None and not scale.ndim]
    if quantizer is None or codes is None or codes.dtype != np.int8 or len(numbers) != len(scales):
        return None
    return _LinearNodes(node, weight, codes, (quantizer.input[0], numbers[0], numbers[1]))
