"""Rewrite an ONNX file of any origin into one whose INT8 GEMMs an engine runs, and say what changed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

import onnx

from qdqbench.quantize.check.check import CheckReport, check_model
from qdqbench.quantize.core import files
from qdqbench.quantize.core.arrays import Array
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.engine.inspection import named
from qdqbench.quantize.fix.floats import finite_masks, to_half
from qdqbench.quantize.fix.lift import lift
from qdqbench.quantize.fix.prove import compare_outputs, engine_row, find_builder
from qdqbench.quantize.fix.rebuild import place, strip
from qdqbench.quantize.fix.results import FixReport
from qdqbench.quantize.fix.runs import Feeds, fitting, random_feeds, ranges, read_feeds
from qdqbench.quantize.fix.scales import Product, Scales, read_scales
from qdqbench.quantize.graph.index import opset_of
from qdqbench.quantize.graph.read import MAX_FILE, read_model
from qdqbench.quantize.graph.weights import factor_scales

Compute = Literal["fp16", "keep"]
WeightForm = Literal["channel", "factored"]
COMPUTE, WEIGHTS = get_args(Compute), get_args(WeightForm)
LIMIT = 0.1  # relative error of outputs to the same graph without Q/DQ


@dataclass(frozen=True)
class FixOptions:
    """How a file is rewritten and proven."""

    compute: Compute = "fp16"  # of what is not INT8 in a graph that is all FP32
    weights: WeightForm = "channel"
    inputs: Path | Mapping[str, Array] | None = (
        None  # samples, which calibrate activations without a scale too
    )
    source: str = ""  # where given arrays come from
    seed: int = 0  # of random inputs
    limit: float = LIMIT
    engine: bool = True  # build engines before and after


def fix(path: Path, out: Path, options: FixOptions) -> FixReport:
    """Mend a file and prove it.

    Raises:
        UserError: the file cannot be read or is not valid, the inputs do not fit, or ONNX Runtime does not
            run what comes out; nothing is written then.
    """
    if out.resolve() == path.resolve():
        raise UserError(f"--out {out} is the file itself; give another name, so that both can be compared")
    model = read_model(path)
    before = _checked(model, path)
    feeds, where = _feeds(model, options)
    done: list[str] = []
    left: list[str] = []
    plain, work = rewrite(model, options, feeds, done, left)
    if work.ByteSize() > MAX_FILE:
        raise UserError(
            f"the mended graph of {path} is over protobuf's limit of {MAX_FILE} bytes; give a smaller one"
        )
    data = work.SerializeToString(deterministic=True)
    after = check_model(work)
    with files.atomic_path(out) as temporary:
        temporary.write_bytes(data)
        compared = compare_outputs(path, plain, temporary, feeds, inputs=where, limit=options.limit)
        builder = find_builder() if options.engine else None
        engines = [engine_row(each, builder) if builder else None for each in (path, temporary)]
    left += [f"{row.code} at {row.node}: {row.fix}" for row in after.errors[:20]]
    return FixReport(
        file=path.name,
        out=out.name,
        done=done,
        left=left,
        findings_before=dict(Counter(row.code for row in before.findings)),
        findings_after=dict(Counter(row.code for row in after.findings)),
        int8_before=before.counts["int8"],
        int8_after=after.counts["int8"],
        gemms=after.counts["gemms"],
        outputs=compared,
        engine_before=engines[0],
        engine_after=engines[1],
    )


def _feeds(model: onnx.ModelProto, options: FixOptions) -> tuple[Feeds, str]:
    """Inputs, and where they come from."""
    given = options.inputs
    if given is None:
        return random_feeds(model, options.seed), f"random, seed {options.seed}"
    if isinstance(given, Path):
        return read_feeds(given, model), str(given)
    return fitting(given, model, options.source), options.source


def _checked(model: onnx.ModelProto, path: Path) -> CheckReport:
    report = check_model(model)
    stopped = [row for row in report.findings if row.code in ("invalid-onnx", "opset-too-low")]
    if stopped:
        raise UserError(f"{path} cannot be mended: {stopped[0].node}: {stopped[0].why}; {stopped[0].fix}")
    return report


def rewrite(
    model: onnx.ModelProto, options: FixOptions, feeds: Feeds, done: list[str], left: list[str]
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The graph without Q/DQ, and the mended one; what was done and could not be is added to the lists."""
    work = onnx.ModelProto()
    work.CopyFrom(model)
    lifted, integer = lift(work)
    if lifted:
        done.append(f"{lifted} operators that compute on codes are Q, DQ and the plain operator")
    if integer:
        left.append(f"{len(integer)} operators compute on codes ({name_list(integer)}): export them as Q/DQ")
    scales = read_scales(work)
    taken = strip(work)
    plain = onnx.ModelProto()
    plain.CopyFrom(work)
    calibrated = _calibrate(plain, scales, feeds) if options.inputs is not None else []
    if masks := finite_masks(work):
        done.append(f"{len(masks)} masks that FP16 does not hold are -1e4 ({name_list(masks)})")
    made, rounded = place(work, [*scales.products, *calibrated])
    placed = sum(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in work.graph.node)
    done += _sentences(scales, taken, placed, made, rounded, calibrated)
    scaled = {product.node for product in calibrated}
    if waiting := [product.label for product in scales.waiting if product.node not in scaled]:
        left.append(
            f"{len(waiting)} GEMMs have no usable scale for their input ({named(waiting)}): "
            "they are floating point now; samples calibrate them: --inputs, or --model with --task and --data"
        )
    if scales.unusable:
        left.append(
            f"{len(scales.unusable)} scales are unusable ({name_list(scales.unusable)}): calibrate again"
        )
    if options.weights == "factored" and made:
        factor_scales(work)
        done.append("scales of weights are a scalar in the DQ and a Mul behind the MatMul")
    if options.compute == "fp16" and _is_fp32(work):
        to_half(work)
        done.append("what is not INT8 computes in FP16, LayerNorms in FP32; Q/DQ have FP32 scales")
    if opset_of(work) >= 13 and work.ir_version > 10:
        work.ir_version = 10
    known = {entry.key: entry.value for entry in work.metadata_props}
    onnx.helper.set_model_props(work, known | {"qdqbench.fix": metadata.version("qdqbench")})
    _validate(work)
    return plain, work


def _calibrate(plain: onnx.ModelProto, scales: Scales, feeds: Feeds) -> list[Product]:
    """Products whose activation gets a scale from the given samples: its largest value."""
    waiting = {product.node: product for product in scales.waiting}
    sources = {
        output: node.input[0] for node in plain.graph.node for output in node.output if output in waiting
    }
    found = ranges(plain, sources.values(), feeds) if sources else {}
    return [
        replace(waiting[output], amax={0: found[source]})
        for output, source in sources.items()
        if 0 < found[source] < float("inf")
    ]


def _sentences(  # noqa: PLR0913, PLR0917
    scales: Scales, taken: int, placed: int, made: int, rounded: int, calibrated: list[Product]
) -> list[str]:
    """What was done to the Q/DQ, as far as anything was."""
    told = [
        (
            taken,
            f"{taken} Q and DQ taken off, {placed} put on: at the inputs of {made} GEMMs, and nowhere else",
        ),
        (made, "weights are INT8 codes [N, K] with a DQ alone"),
        (rounded, f"{rounded} weights are rounded anew, with a scale an output channel"),
        (
            len(scales.shifted),
            f"{len(scales.shifted)} UINT8 with zero point 128 are INT8: the same codes less 128",
        ),
        (
            len(scales.widened),
            f"{len(scales.widened)} ranges with a zero point are symmetric, with steps up to twice as wide",
        ),
        (
            len(scales.completed),
            f"{len(scales.completed)} GEMMs had Q/DQ on their activation alone: their weights have it too",
        ),
        (
            len(calibrated),
            f"{len(calibrated)} activations without a scale are calibrated on the given samples",
        ),
        (
            len(scales.apart),
            f"{len(scales.apart)} products of partly quantized attentions are floating point, to be fused",
        ),
    ]
    return [text for count, text in told if count]


def _is_fp32(model: onnx.ModelProto) -> bool:
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    casts = {item.i for node in model.graph.node if node.op_type == "Cast" for item in node.attribute}
    return onnx.TensorProto.FLOAT in kinds and not {10, 16}.intersection(kinds | casts)


def _validate(model: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(f"the mended graph is not valid ({why}); nothing was written") from error
