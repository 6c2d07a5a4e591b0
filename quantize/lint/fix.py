"""Rewrite an ONNX file of any origin into one whose INT8 GEMMs an engine runs, and say what changed."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

from qdqbench.quantize.engine.backend import Backend, build_engine, choose_backend, gpu_backend
from qdqbench.quantize.engine.layers import format_nodes
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.graph.index import (
    MAX_STEPS,
    MOVES,
    ONNX_DOMAINS,
    QDQ_DOMAINS,
    GraphIndex,
    argument,
    attribute,
    is_qdq,
    module_of,
    opset_of,
    prune,
    replace_nodes,
)
from qdqbench.quantize.graph.precision import constants_to_initializers, drop_noop_casts, to_fp16
from qdqbench.quantize.graph.read import MAX_FILE, read_model
from qdqbench.quantize.graph.weights import factor_scales
from qdqbench.quantize.lint import runs
from qdqbench.quantize.lint.check import CheckReport, check_model
from qdqbench.quantize.lint.findings import finding_label
from qdqbench.quantize.lint.inspection import inspect_layers, read_graph
from qdqbench.quantize.lint.rebuild import Product, Scales, insert_qdq, read_scales, remove_qdq
from qdqbench.quantize.lint.view import PLAIN_FORMS, PlainForm, is_integer, list_constants
from qdqbench.quantize.models.attention import MASK_FILL
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.limits import FP16_MAX
from qdqbench.quantize.utils.names import count_of, name_list
from qdqbench.quantize.utils.schema import Strict, field
from qdqbench.quantize.utils.system.cpu import find_memory


def qoperator_to_qdq(model: onnx.ModelProto) -> tuple[int, list[str]]:
    """Write integer operators as Q/DQ around plain ones, in place; return their number, and what stays."""
    index = GraphIndex(model)
    made: Replaced = {}
    left: list[str] = []
    for node in model.graph.node:
        if node.domain not in QDQ_DOMAINS:
            continue
        new = None
        if node.op_type in PLAIN_FORMS:
            new = _to_plain(model, index, node, PLAIN_FORMS[node.op_type])
        elif node.op_type == "MatMulInteger":
            new = _dynamic(model, index, node)
        if new is not None:
            made |= new
        elif is_integer(node) and node.op_type != "DynamicQuantizeLinear":
            left.append(finding_label(node))
    count = sum(bool(nodes) for nodes in made.values())
    replace_nodes(model, [new for node in model.graph.node for new in made.get(id(node), [node])])
    return count, left


Replaced = dict[int, list[onnx.NodeProto]]  # by the id of a node: what stands in its place


def _to_plain(
    model: onnx.ModelProto, index: GraphIndex, node: onnx.NodeProto, form: PlainForm
) -> Replaced | None:
    inputs = [*node.input]
    if len(inputs) <= max(form.operands) + 1:
        return None
    name = node.name.removesuffix("_quant") or node.output[0]
    new, plain = list[onnx.NodeProto](), list[str]()
    for number, start in enumerate(form.operands):
        operand, given = f"{name}_operand_{number}", [each for each in inputs[start : start + 3] if each]
        plain.append(f"{operand}_float")
        dq = helper.make_node("DequantizeLinear", given, plain[-1:], name=f"{operand}_DQ")
        codes, scale = index.stored(inputs[start]), index.constant(inputs[start + 1])
        if scale is not None and scale.size > 1 and codes is not None:  # along N of a weight [K, N]
            turned = "transB" in form.kept and attribute(node, "transB")  # or [N, K]
            dq.attribute.append(helper.make_attribute("axis", 0 if turned else len(codes.dims) - 1))
        new.append(dq)
    if node.op_type == "QGemm" and argument(node, 6):
        bias, *scales = (index.constant(inputs[position]) for position in (6, 1, 4))
        if bias is None or scales[0] is None or scales[1] is None:
            return None
        alpha = next((item.f for item in node.attribute if item.name == "alpha"), 1.0)
        value = bias.astype(np.float32) * scales[0].astype(np.float32) * scales[1].astype(np.float32) * alpha
        plain.append(f"{name}_bias_float")
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), plain[-1]))
    result = argument(node, form.result)
    target = f"{node.output[0]}_plain" if result else node.output[0]
    made = helper.make_node(form.plain, plain, [target], name=name)
    made.attribute.extend(item for item in node.attribute if item.name in form.kept)
    new.append(made)
    if result:
        ends = [name for name in inputs[form.result : form.result + 2] if name]
        new.append(helper.make_node("QuantizeLinear", [target, *ends], [node.output[0]], name=f"{name}_Q"))
    return {id(node): new}


def _dynamic(model: onnx.ModelProto, index: GraphIndex, node: onnx.NodeProto) -> Replaced | None:
    """Rewrite nodes of `quantize_dynamic`: DynamicQuantizeLinear, MatMulInteger, Cast, Mul by both scales."""
    source = index.producers.get(node.input[0])
    cast = _only(index, node.output[0], "Cast")
    rescale = _only(index, cast.output[0], "Mul") if cast is not None else None
    codes = index.constant(node.input[1])
    if source is None or source.op_type != "DynamicQuantizeLinear" or codes is None or cast is None:
        return None
    other = next((name for name in rescale.input if name != cast.output[0]), "") if rescale else ""
    scales = index.producers.get(other)
    factors = scales.input if scales is not None and scales.op_type == "Mul" else ()
    weight_scale = next((value for name in factors if (value := index.constant(name)) is not None), None)
    if rescale is None or weight_scale is None:
        return None
    # In a file of FP16 its scales are FP16, as is what else reads the activation.
    kind = np.float16 if weight_scale.dtype == np.float16 else np.float32
    zero = index.constant(argument(node, 3))
    shift = np.zeros((), np.int32) if zero is None else zero.astype(np.int32)
    moved = codes.astype(np.int32) - shift
    name = node.name.removesuffix("_quant") or node.output[0]
    if moved.min(initial=0) >= -128 and moved.max(initial=0) <= 127:
        scale = np.atleast_1d(np.asarray(weight_scale, np.float32))
        signed, steps = moved.astype(np.int8), scale if scale.size > 1 else scale.reshape(())
    else:  # asymmetric: rounded again, by channel
        weight = moved.astype(np.float32) * np.asarray(weight_scale, np.float32)
        steps = np.maximum(np.abs(weight).max(0), np.float32(1e-12)) / np.float32(127)
        signed = np.clip(np.rint(weight / steps), -127, 127).astype(np.int8)
    tensors: dict[str, Array] = {f"{name}_codes": signed, f"{name}_scale": steps.astype(kind)}
    model.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in tensors.items())
    dq = helper.make_node("DequantizeLinear", [*tensors], [f"{name}_weight"], name=f"{name}_weight_DQ")
    if steps.ndim:
        dq.attribute.append(helper.make_attribute("axis", codes.ndim - 1))
    product = helper.make_node("MatMul", [source.input[0], f"{name}_weight"], [rescale.output[0]], name=name)
    return {id(node): [dq, product], id(cast): [], id(rescale): []}


def _only(index: GraphIndex, tensor: str, operator: str) -> onnx.NodeProto | None:
    readers = index.consumers.get(tensor, [])
    return readers[0] if len(readers) == 1 and readers[0].op_type == operator else None


class EngineRow(Strict):
    engine: str  # backend, version, compute capability
    refused: str | None = None
    gemms: int = 0  # linears that its layer table names
    int8_gemms: int = 0
    attentions: int = 0
    attention_fused: int = 0
    attention_int8: int = 0
    kernels: int = 0


class OutputRow(Strict):
    """One output in ONNX Runtime. Errors of floats are relative, ||a - b|| / ||b||; of integers the share
    of other values. Where it has another length, the share of missing values counts if that is more."""

    name: str = field("Name of the output.")
    before_error: float | None = field("Error of the given file to itself without Q/DQ; null if refused.")
    after_error: float = field("Error of the written file against the same reference.")
    difference: float | None = field("Error of the written file against the given one.")
    limit: float = field("Limit of `after_error`.")
    largest: float | None = field("Largest absolute difference between the two files.")
    disagreements: int | None = field("Samples with another class; null without class scores.")
    other_lengths: int = field("Batches in which the written file has another shape.", default=0)

    @property
    def holds(self) -> bool:
        return self.after_error <= self.limit


class Outputs(OutputRow):
    """The worst output, and all of them: one norm over several would hide a small one."""

    inputs: str = field("Source of the inputs.")
    n: int = field("Samples.")
    rows: list[OutputRow] = field("Every output.", default=[])


class FixReport(Strict):
    file: str
    out: str
    done: list[str]  # sentences
    left: list[str]  # what could not be fixed, and what to do
    findings_before: dict[str, int]  # code of `check` -> how many
    findings_after: dict[str, int]
    int8_before: int  # linears that TensorRT would run in INT8, by the graph: 0 in a refused file
    int8_after: int
    linears: int
    outputs: Outputs
    engine_wanted: bool = True
    engine_before: EngineRow | None = None  # None: not built
    engine_after: EngineRow | None = None

    @property
    def failures(self) -> list[str]:
        found = []
        out = self.outputs
        if out.after_error >= NOT_FINITE:
            found.append(f"output {out.name} is NaN or infinite")
        elif not out.holds:
            found.append(f"output {out.name} is {out.after_error:.3g} off, and the limit is {out.limit:.3g}")
        if self.engine_after and self.engine_after.refused:
            found.append("the builder refuses what was written")
        return found + self.left


Compute = Literal["fp16", "keep"]
WeightForm = Literal["channel", "factored"]
LIMIT = 0.1  # relative error of outputs to the same graph without Q/DQ


@dataclass(frozen=True)
class FixOptions:
    compute: Compute = "fp16"  # of what is not INT8 in a graph that is all FP32
    weights: WeightForm = "channel"
    inputs: Path | Mapping[str, Array] | None = None  # samples, which calibrate what has no scale too
    source: str = ""  # where given arrays come from
    seed: int = 0  # of random inputs
    max_error: float = LIMIT
    engine: bool = True  # build engines before and after


def fix(path: Path, out: Path, options: FixOptions) -> FixReport:
    """Repair a file and prove it; nothing is written where UserError says why it cannot be done."""
    if out.resolve() == path.resolve():
        raise UserError(f"--out {out} is the file itself; give another name, so that both can be compared")
    model = read_model(path)
    before = check_model(model)
    stopped = [row for row in before.refusals if row.code in ("invalid-onnx", "opset-too-low")]
    if stopped:
        raise UserError(f"{path} cannot be fixed: {stopped[0].node}: {stopped[0].why}; {stopped[0].fix}")
    if options.inputs is None:
        feeds, where = runs.random_feeds(model, options.seed), f"random, seed {options.seed}"
    elif isinstance(options.inputs, Path):
        feeds, where = runs.read_feeds(options.inputs, model), str(options.inputs)
    else:
        feeds, where = runs.select_feeds(options.inputs, model, options.source), options.source
    plain, work, done, left = rewrite(model, options, feeds)
    if work.ByteSize() > MAX_FILE:
        raise UserError(
            f"the rewritten graph of {path} is over protobuf's limit of {MAX_FILE} bytes; give a smaller one"
        )
    data = work.SerializeToString(deterministic=True)
    after = check_model(work)
    with files.atomic_path(out) as temporary:
        temporary.write_bytes(data)
        try:
            compared = compare_outputs(path, plain, temporary, feeds, inputs=where, limit=options.max_error)
        except UserError as error:
            raise _explain(error, options) from error
        builder = None
        if options.engine:
            with suppress(MissingDevice):
                builder = choose_backend(gpu_backend())
        engines = [engine_row(each, builder) if builder else None for each in (path, temporary)]
    for code, rows in after.codes.items():
        if errors := [row for row in rows if row.severity == "error"]:
            where = name_list([row.node for row in errors])
            left.append(f"{code} in {count_of(len(errors), 'node')} ({where}): {errors[0].fix}")
    return FixReport(
        file=path.name,
        out=out.name,
        done=done,
        left=left,
        findings_before=dict(Counter(row.code for row in before.findings)),
        findings_after=dict(Counter(row.code for row in after.findings)),
        int8_before=before.counts["int8_linears"],
        int8_after=after.counts["int8_linears"],
        linears=after.counts["linears"],
        outputs=compared,
        engine_wanted=options.engine,
        engine_before=engines[0],
        engine_after=engines[1],
    )


def _explain(error: UserError, options: FixOptions) -> UserError:
    """Return the error with what to do where ONNX Runtime does not run a graph, or not on these inputs."""
    if isinstance(error, runs.CannotLoad):
        return UserError(f"{error}; outputs are compared in it, so export for its operators")
    if runs.took_too_long(error):
        return error
    fits = "give --inputs FILE.npz with samples that it takes"
    if options.inputs is None:
        fits = f"random inputs do not fit every graph, so {fits}"
    return UserError(f"{fits}: {error}")


class Rewritten(NamedTuple):
    plain: onnx.ModelProto  # the values without Q/DQ
    work: onnx.ModelProto
    done: list[str]
    left: list[str]


def rewrite(model: onnx.ModelProto, options: FixOptions, feeds: runs.Feeds) -> Rewritten:
    done, left, work = list[str](), list[str](), deepcopy(model)
    _name_apart(work)
    converted, integer = qoperator_to_qdq(work)
    if converted:
        prune(work)
        done.append(f"{converted} operators that compute on codes are Q, DQ and the plain operator")
    if integer:
        left.append(f"{len(integer)} operators compute on codes ({name_list(integer)}): export them as Q/DQ")
    scales = read_scales(work)
    _require_passable(check_model(work), scales)
    taken = remove_qdq(work)
    plain = deepcopy(work)
    calibrated = _calibrate(plain, scales, feeds) if options.inputs is not None else []
    if masks := finite_masks(work):
        done.append(f"{len(masks)} masks that FP16 does not hold are -1e4 ({name_list(masks)})")
    made, rounded, odd = insert_qdq(work, [*scales.products, *calibrated])
    placed = sum(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in work.graph.node)
    counts = {
        f"{{n}} Q and DQ taken off, {placed} put on: at the inputs of {made} GEMMs, and nowhere else": taken,
        "weights are INT8 codes [N, K] with a DQ alone": made,
        "{n} weights are rounded again, with a scale per output channel": rounded,
        "{n} UINT8 with zero point 128 are INT8: the same codes less 128": len(scales.shifted),
        "{n} ranges with a zero point are symmetric, with steps up to twice as wide": len(scales.widened),
        "{n} ranges of FP8 are ranges of INT8": len(scales.converted),
        "{n} GEMMs had Q/DQ on their activation alone: their weights have it too": len(scales.completed),
        "{n} activations without a scale are calibrated on the given samples": len(calibrated),
        "{n} products of partly quantized attentions are floating point, to be fused": len(scales.apart),
    }
    done += [text.replace("{n}", str(count)) for text, count in counts.items() if count]
    scaled = {product.node for product in calibrated}
    if waiting := [product.label for product in scales.waiting if product.node not in scaled]:
        left.append(
            f"{len(waiting)} GEMMs have no usable scale for their input ({format_nodes(waiting)}): "
            "they are floating point now; samples calibrate them: --inputs, or --model with --task and --data"
        )
    more = {
        f"GEMMs are floating point now ({format_nodes(odd)}), as their weight is no stored matrix, or alpha "
        "or beta is not 1: write them as MatMul": odd,
        f"scales are unusable ({name_list(scales.unusable)}): calibrate again": scales.unusable,
    }
    left += [f"{len(names)} {text}" for text, names in more.items() if names]
    if options.weights == "factored" and made:
        factor_scales(work)
        done.append("scales of weights are a scalar in the DQ and a Mul after the MatMul")
    if options.compute == "fp16" and _is_fp32(work):
        half = deepcopy(work)
        if why := to_half(half):
            done.append(f"what is not INT8 stays in FP32, as with --compute keep: in FP16 {why}")
        else:
            work = half
            norms = ", LayerNorms in FP32" * bool(_norms(work))
            done.append(f"what is not INT8 computes in FP16{norms}; Q/DQ have FP32 scales")
    if not (taken or converted or made):
        done.append("nothing in the file is quantized, so no more was done; `qdqbench run` quantizes a model")
    if opset_of(work) >= 13 and work.ir_version > 10:
        work.ir_version = 10
    known = {entry.key: entry.value for entry in work.metadata_props}
    onnx.helper.set_model_props(work, known | {"qdqbench.fix": metadata.version("qdqbench")})
    if why := _why_invalid(work):
        raise UserError(f"the rewritten graph is not valid ({why}); nothing was written")
    return Rewritten(plain, work, done, left)


def _name_apart(model: onnx.ModelProto) -> None:
    """Give nodes that share a name one of their own, from which those of new tensors follow."""
    shared = Counter(node.name for node in model.graph.node)
    for node in model.graph.node:
        if node.name and shared[node.name] > 1 and node.output:
            node.name = f"{node.name}/{node.output[0]}"


def _require_passable(report: CheckReport, scales: Scales) -> None:
    """Stop in the words of `check` at what no rewrite knows: a mix's right type, a weight's values."""
    stops = [
        row
        for row in report.findings
        if (row.code == "mixed-types" and row.effect == "refused") or row.node in scales.lost
    ]
    if stops:
        first, nodes = stops[0], dict.fromkeys(row.node for row in stops)
        raise UserError(
            f"{first.code} in {count_of(len(nodes), 'node')} ({name_list([*nodes])}) cannot be fixed: "
            f"{first.node}: {first.why}; {first.fix}"
        )


def _why_invalid(model: onnx.ModelProto) -> str:
    try:
        if not _has_shapes(model):  # of its outputs, which may be left out
            model = onnx.shape_inference.infer_shapes(model)
        if _has_shapes(model):
            onnx.checker.check_model(model, full_check=True)
    except (ValueError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return " ".join(str(error).split())[:300]
    return ""


def _has_shapes(model: onnx.ModelProto) -> bool:
    return all(value.type.tensor_type.HasField("shape") for value in model.graph.output)


def _calibrate(plain: onnx.ModelProto, scales: Scales, feeds: runs.Feeds) -> list[Product]:
    waiting = {product.node: product for product in scales.waiting}
    sources = {name: node.input[0] for node in plain.graph.node for name in node.output if name in waiting}
    found = runs.measure_ranges(plain, sources.values(), feeds) if sources else {}
    return [
        replace(waiting[output], amax={0: found[source]})
        for output, source in sources.items()
        if 0 < found[source] < float("inf")
    ]


def _is_fp32(model: onnx.ModelProto) -> bool:
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    casts = {item.i for node in model.graph.node if node.op_type == "Cast" for item in node.attribute}
    return onnx.TensorProto.FLOAT in kinds and not {10, 16}.intersection(kinds | casts)


BUILD_SECONDS = 900  # of one engine; BERT-large with one profile takes a minute or two
BUILD_MEMORY = 80  # of this process, in percent of the machine's or container's
FACTOR = 1.5  # a range made symmetric has steps up to twice as wide
BROKEN = 0.5  # error of an output that is wrong, whatever it was before
NOT_FINITE = 1e9  # error of NaN and infinity, which JSON does not have
MOST_CLASSES = 1000
Batches = Sequence[Mapping[str, Array]]  # outputs by name
PROFILE = Profile((1, 8), (8, 64), (32, 128))


def compare_outputs(  # noqa: PLR0913  the last two are keywords
    before: Path,
    plain: onnx.ModelProto,
    after: Path,
    feeds: Mapping[str, Array],
    *,
    inputs: str,
    limit: float,
) -> Outputs:
    """Run the file, its values without Q/DQ (the reference), and what was written, on the same inputs."""
    size, reference = runs.run_fitting(plain, feeds)
    made = runs.run_batches(after, feeds, size)
    own: list[dict[str, Array]] = []
    with suppress(UserError):  # ONNX Runtime may refuse the file as it was
        own = runs.run_batches(before, feeds, size)
    rows = [_compare_output(name, own, made, reference, limit) for name in reference[0]]
    worst = max(rows, key=lambda row: row.after_error / row.limit)
    n = max((len(value) for value in feeds.values()), default=0)
    return Outputs(**worst.model_dump(), inputs=inputs, n=n, rows=rows)


def _compare_output(name: str, own: Batches, made: Batches, reference: Batches, limit: float) -> OutputRow:
    after = _distance(name, made, reference)
    before, change = (_distance(name, own, reference), _distance(name, made, own)) if own else (None, None)
    return OutputRow(
        name=name,
        before_error=before.error if before else None,
        after_error=after.error,
        difference=change.error if change else None,
        limit=max(limit, min(FACTOR * before.error, BROKEN)) if before else limit,
        largest=change.largest if change else None,
        disagreements=change.disagreements if change else None,
        other_lengths=(change or after).other_lengths,
    )


@dataclass
class _Distance:
    error: float
    largest: float
    disagreements: int | None
    other_lengths: int


def _distance(name: str, one: Batches, other: Batches) -> _Distance:
    above = below = largest = 0.0
    missing = values = unequal = same = other_lengths = 0
    disagreements: int | None = None
    for got, known in ((a.get(name), b[name]) for a, b in zip(one, other, strict=True)):
        values += known.size
        if got is None or got.shape != known.shape:
            other_lengths += 1
            size = 0 if got is None else got.size
            missing += abs(size - known.size) or known.size
        elif known.dtype.kind != "f":
            unequal, same = unequal + int((got != known).sum()), same + known.size
        else:
            difference = np.abs(got.astype(np.float64) - known)
            largest = max(largest, float(difference.max(initial=0.0)))
            above, below = above + float(np.square(difference).sum()), below + float(np.square(known).sum())
            if known.ndim == 2 and 1 < known.shape[1] < MOST_CLASSES:
                disagreements = (disagreements or 0) + int((got.argmax(1) != known.argmax(1)).sum())
    error = max(
        (above / below) ** 0.5 if below else float(above > 0),
        unequal / same if same else 0.0,
        missing / values if values else float(missing > 0),
    )
    if not np.isfinite(above):
        error = largest = NOT_FINITE
    return _Distance(error, largest, disagreements, other_lengths)


def engine_row(path: Path, backend: Backend) -> EngineRow:
    """Build an engine of a file within BUILD_SECONDS and BUILD_MEMORY; read from its layers what is INT8."""
    inputs = [value.type.tensor_type.shape.dim for value in runs.graph_inputs(read_model(path))]
    dynamic = any(not entry.HasField("dim_value") for shape in inputs for entry in shape)
    engine, deadline = f"{backend.name} {backend.version}", time.monotonic() + BUILD_SECONDS
    memory = find_memory()

    def stop_early(_phase: str, _fraction: float) -> None:
        used = 100 * psutil.Process().memory_info().rss / memory
        if time.monotonic() > deadline or used > BUILD_MEMORY:
            most = f"{BUILD_MEMORY}% of the machine's memory" if used > BUILD_MEMORY else f"{BUILD_SECONDS} s"
            raise UserError(f"the builder took over {most} for {path.name} and was stopped")

    try:
        built = build_engine(path, backend, [PROFILE] if dynamic else [], progress=stop_early)
    except UserError as error:
        why = " ".join(str(error).replace(str(path), path.name).split())
        return EngineRow(engine=engine, refused=why[:600])
    engine += f", compute capability {', '.join(built.compute_capability)}"
    engine += ", built ahead of time" if built.ahead_of_time else ""
    if not built.layers:
        return EngineRow(engine=engine, refused="the builder shows no layer table")
    judged = inspect_layers(built.layers, read_graph(path))
    return EngineRow(
        engine=engine,
        gemms=judged.gemms,
        int8_gemms=len(set(judged.proven).intersection(judged.graph.linears)),
        attentions=judged.attentions,
        attention_fused=judged.attention_fused,
        attention_int8=judged.attention_int8,
        kernels=len(judged.rows),
    )


_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_TO_SOFTMAX = (*MOVES, "Add", "Sub", "Mul", "Div", "Where", "Concat", "Neg", "Max", "Min", "And", "Clip")


def finite_masks(model: onnx.ModelProto) -> list[str]:
    """Replace what masks scores and does not fit FP16 by MASK_FILL, in place; return what was changed."""
    index, changed = GraphIndex(model), []
    for name, tensor, maker in list_constants(index):
        if tensor.data_type not in _FLOATS:
            continue
        value = numpy_helper.to_array(tensor)
        low = ~(value >= -FP16_MAX) & ~np.isnan(value)
        readers = index.forward(name, _TO_SOFTMAX, 8 * MAX_STEPS)
        if low.any() and any(node.op_type == "Softmax" for node in readers):
            finite = np.where(low, value.dtype.type(MASK_FILL), value)
            fits = numpy_helper.from_array(finite, tensor.name)
            if maker is None:
                tensor.CopyFrom(fits)
            else:
                maker.ClearField("attribute")
                maker.attribute.append(helper.make_attribute("value", fits))
            changed.append(name)
    return changed


def to_half(model: onnx.ModelProto) -> str:
    """Give an FP32 graph FP16 compute, in place: Q/DQ keep FP32 scales, LayerNorms compute in FP32.

    Return why the result is no valid graph, or "".
    """
    nodes = [node for node in model.graph.node if node.domain not in ONNX_DOMAINS and not is_qdq(node)]
    if foreign := {node.op_type for node in nodes}:
        return f"operators of other domains may not run ({name_list(sorted(foreign))})"
    try:
        constants_to_initializers(model)
        drop_noop_casts(model)
        to_fp16(model, _norms(model))
        prune(model)
    except CheckFailed as error:
        return str(error)
    except onnx.shape_inference.InferenceError as error:
        return f"the types of the graph cannot be told ({' '.join(str(error).split())[:200]})"
    return _why_invalid(model)


def _norms(model: onnx.ModelProto) -> set[str]:
    found = {
        module_of(node.name)
        for node in model.graph.node
        if node.op_type in ("LayerNormalization", "Pow", "ReduceMean", "ReduceVariance") and node.name
    }
    own = {module for module in found if "norm" in module.rpartition(".")[2].lower()}
    flat = (node for node in model.graph.node if not module_of(node.name))  # torch.export names no modules
    return {node.name for node in flat if node.op_type == "LayerNormalization"} | (own or (found - {""}))
