"""Find the first ONNX tensor that an engine gets wrong, and say which node, kernel and cause it points at.

First every block gets the reference's own input in one stitched engine, which finds the bad block. Then
tensors inside of that block are marked as outputs, a few per engine, in the order of the graph. Marking a
tensor makes the builder keep it and can change what it fuses: when the fault vanishes with it, that is said.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqbench.eval.metrics.parity import LIMIT_FRACTION, LIMIT_STEP
from qdqbench.eval.metrics.runners import session_of
from qdqbench.eval.verification import blocks
from qdqbench.eval.verification.checks import MIN_LIMIT, TensorError, compare_tensors, kept_positions
from qdqbench.eval.verification.engine import batch_of, block_cases, engine_of, widest
from qdqbench.eval.verification.results import read_verified
from qdqbench.quantize.engine.cuda.file import list_rows
from qdqbench.quantize.engine.cuda.interpret import compute
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.model import load_kernels
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.engine.cuda.plan import Linear, Operation
from qdqbench.quantize.engine.cuda.runtime import CudaEngine
from qdqbench.quantize.engine.cuda.tokens import pack_tokens
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.engine.target import computes_fp16
from qdqbench.quantize.graph.index import MATMULS, SAME_VALUES, GraphIndex, module_of
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.models.inputs import MASK, select_inputs
from qdqbench.quantize.pipeline import graphs, outcomes
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import FP16_MAX
from qdqbench.quantize.utils.schema import Strict
from qdqbench.quantize.utils.system.gpu import find_gpu

EXPLAINED = 0.3  # of the error may stay behind when a factor or an offset explains it
_LINEAR_TAIL = (*SAME_VALUES, "Mul", "Add", "Div", "Sub")
_NORM_PARTS = ("LayerNormalization", "ReduceMean", "Pow", "Sqrt", "Reciprocal")


@dataclass
class Deviation:
    """Evidence about the first wrong tensor."""

    index: GraphIndex
    node: onnx.NodeProto  # that makes it
    got: Array | None  # None: the fault vanished when the tensor was marked
    expected: Array | None
    mask: Array  # [batch, length]
    nonfinite: bool


def likely_cause(evidence: Deviation) -> tuple[str, str]:
    found = filter(None, (rule(evidence) for rule in (_overflow, _mask, _scale_or_bias)))
    advice = "compare the kernels named above with those of another backend version, and report it"
    return next(found, ("unknown", advice))


def _overflow(evidence: Deviation) -> tuple[str, str] | None:
    """Tell what leaves the range of FP16: what follows a GEMM, the variance of a norm, or the values."""
    if not evidence.nonfinite:
        return None
    node = evidence.node
    if (gemm := _behind_int8(evidence)) is not None:
        return (
            f"FP16 overflow after the INT8 GEMM {gemm.name}",
            "export with `weight_scales: factored`, or keep the layer in FP32",
        )
    if node.op_type in _NORM_PARTS or module_of(node.name).lower().endswith("norm"):
        return (
            "LayerNorm in FP16: its variance leaves the range of FP16",
            "give the LayerNorm `precision: fp32` in the recipe's rules",
        )
    truth = np.zeros(1) if evidence.expected is None else evidence.expected.astype(np.float64)
    if (largest := float(np.abs(np.nan_to_num(truth, posinf=np.inf)).max())) >= FP16_MAX / 4:
        return (
            f"FP16 overflow: the reference reaches {largest:.3g} here, FP16 ends at {FP16_MAX:.0f}",
            "keep the layer in FP32 with a rule `precision: fp32`",
        )
    return None


def _mask(evidence: Deviation) -> tuple[str, str] | None:
    """Find that samples with padding are wrong and the others are not."""
    got, expected, mask = evidence.got, evidence.expected, evidence.mask
    padded = ~mask.all(axis=1)
    if got is None or expected is None or got.shape[:1] != mask.shape[:1] or got.shape != expected.shape:
        return None
    rows = (slice(row, row + 1) for row in range(len(mask)))
    found = [compare_tensors("", got[one], expected[one], mask[one], 0.0).error for one in rows]
    errors = np.array(found, dtype=np.float64)  # NaN where one is not finite
    if not np.isfinite(errors).all() or padded.all() or not padded.any():
        return None
    if np.min(errors[padded]) <= 10 * np.max(errors[~padded]) or np.min(errors[padded]) < 0.01:
        return None
    return (
        "only samples with padding are wrong: the constant or the type of the attention mask",
        "the mask must be a finite FP16 number far below every score, such as -1e4",
    )


def _scale_or_bias(evidence: Deviation) -> tuple[str, str] | None:
    """Find one factor, or one number per channel, that explains the error."""
    if evidence.got is None or evidence.expected is None or evidence.nonfinite:
        return None
    got, expected = (kept_positions(a, evidence.mask) for a in (evidence.got, evidence.expected))
    if not got.size:
        return None
    got, expected = (a.reshape(len(a), -1) for a in (got, expected))  # [positions, channels]
    error = got - expected
    explained = EXPLAINED * np.linalg.norm(error)
    factor = float((got * expected).sum() / max(float((expected**2).sum()), 1e-30))
    if abs(factor - 1) >= 0.01 and np.linalg.norm(got - factor * expected) <= explained:
        return (
            f"off by the constant factor {factor:.4g}: a wrong scale",
            "compare the scales of the node's Q/DQ with calibration.json",
        )
    if len(got) >= 8 and np.linalg.norm(error - error.mean(axis=0)) <= explained:
        return (
            "off by one constant per channel: a lost or wrong bias",
            "check the Add after the MatMul in the ONNX file",
        )
    return None


def _behind_int8(evidence: Deviation) -> onnx.NodeProto | None:
    """Return the INT8 GEMM that reaches the node through factors, biases, residuals and moves only."""

    def inputs(node: onnx.NodeProto) -> Sequence[str]:
        tail = node.op_type in _LINEAR_TAIL or (node == evidence.node and node.op_type not in MATMULS)
        return node.input if tail else ()

    for _, node in evidence.index.back(evidence.node.output[0], inputs):
        if node is not None and node.op_type in MATMULS:
            origins = [evidence.index.origin(name, SAME_VALUES)[0] for name in node.input[:2]]
            if all(made is not None and made.op_type == "DequantizeLinear" for made in origins):
                return node
    return None


INNER_LIMIT = 0.05  # of a tensor inside of a block
JUMP = 3.0  # over the largest error of the tensors it is made from
PER_STEP = 8  # tensors marked in one engine
HALF_LIMIT = 4e-3  # of FP16 tensors of a kernel, which adds in another order: over the largest value
FEW_CODES = 3  # of a small tensor that may differ by a step
GELU_ERROR = 2**-12  # of what GELU makes, at most: half of the error of the chip's tanh, 2^-11
Feeds = Mapping[str, Array]
GraphRunner = Callable[[onnx.ModelProto, Feeds], dict[str, Array]]


class BisectResult(Strict):
    """First wrong tensor of an engine."""

    blocks: dict[str, TensorError]  # output of each block for the reference's own input
    block: str | None = None  # the first bad one; None: every block is right on its own
    tensor: str | None = None  # the first bad tensor
    node: str | None = None  # the ONNX node that makes it
    operator: str | None = None
    error: TensorError | None = None
    before: TensorError | None = None  # the last good tensor ahead of it that was compared
    layers: list[str] = []  # kernels of the deployed engine that name the node
    cause: str = "none"
    advice: str = ""
    vanished: bool = False  # with these marks the fault is gone: it is in what the builder fuses
    engines: int = 0  # built on the way
    notes: list[str] = []


def bisect(  # noqa: PLR0913
    onnx_path: Path,
    feeds: Feeds,
    run_engine: GraphRunner,
    run_reference: GraphRunner,
    *,
    family: Family,
    tensors: Mapping[str, blocks.BlockTensors],
    suspects: Collection[str] = (),
    layers: Sequence[LayerRow] = (),
) -> BisectResult:
    """Find the first tensor of a graph that `run_engine` gets wrong and `run_reference` right.

    Args:
        feeds: int64 [B, L] arrays of the graph's own inputs.
        tensors: of the reference by block: their inputs are fed, and a block may be off by what quantization
            costs there.
        suspects: blocks that are known to be wrong, such as by a verification of more samples.
        layers: layer table of the deployed engine.

    Raises:
        UserError: the graph cannot be read or cut, or the engine cannot be built.
    """
    stitched = blocks.stitch(read_model(onnx_path), family)
    given, mask = dict(feeds) | stitched.feeds(tensors), np.asarray(feeds[MASK], bool)
    got, expected = run_engine(stitched.model, given), run_reference(stitched.model, given)
    result = BisectResult(blocks={}, engines=1)
    for block in stitched.blocks:
        name, exact = block.output, tensors[block.name]
        cost = compare_tensors(block.name, exact.unquantized, exact.output, mask, 0.0).error
        limit = max(MIN_LIMIT, cost or 0.0)
        result.blocks[block.name] = compare_tensors(name, got[name], expected[name], mask, limit)
    bad = [name for name, row in result.blocks.items() if not row.holds or name in suspects]
    if not bad:
        result.notes.append(
            "every block computes what the ONNX file says when it gets the reference's own input. A fault of "
            "the whole engine is then in what is fused over a block's border, or already in the ONNX file: "
            "see layer parity in the report"
        )
        return result
    result.block = bad[0]
    if len(bad) > 1:
        result.notes.append(f"wrong on their own too: {', '.join(bad[1:])}")
    search = _Search(stitched, given, run_engine, run_reference, mask, result)
    search.run()
    search.explain(layers)
    return result


def bisect_kernels(engine: CudaEngine, model: onnx.ModelProto, feeds: Feeds, family: Family) -> BisectResult:
    """Find the first operation of backend cuda whose kernels make other numbers than the interpreter.

    Each gets what the engine's kernels made before it; weights and scales are packed from the graph again.

    Raises:
        UserError: inputs that no kernel takes, or an engine of another graph.
    """
    plan, arrays = pack(match_graph(model))
    if engine.plan != plan:
        raise UserError("the engine has another plan than its graph; build it again")
    tokens, kept = pack_tokens(plan, arrays, feeds), dict[str, Any]()
    answers = engine.forward(engine.load(tokens), kept)
    count = len(tokens.ids) if plan.head.pooling == "tokens" else len(tokens.starts) - 1
    got = {name: made[: len(tokens.ids)].cpu().numpy() for name, made in kept.items()}
    got |= {name: made[:count].cpu().numpy() for name, made in answers.items()}
    compared: list[tuple[str, Operation, TensorError, Array]] = []
    for operation in plan.operations:
        layer = family.layer_of(operation.name)
        block = operation.name if layer is None else f"layer.{layer}"
        for name, expected in compute(operation, plan, arrays, got, tokens).items():
            row = compare_kernel(operation, name, got[name], expected)
            compared.append((block, operation, row, expected))
    result = BisectResult(blocks={})
    for block, _, row, _ in compared:
        rows = (result.blocks.get(block, row), row)
        result.blocks[block] = max(rows, key=lambda it: math.inf if it.error is None else it.error / it.limit)
    place = next((place for place, (_, _, row, _) in enumerate(compared) if not row.holds), None)
    if place is None:
        result.notes.append(
            "every kernel makes what the interpreter makes. A wrong block is then in the plan: report it"
        )
        return result
    result.block, operation, result.error, expected = compared[place]
    result.before = compared[place - 1][2] if place else None
    result.tensor, result.node, result.operator = result.error.tensor, operation.name, operation.op
    result.layers = [list_rows(plan)[plan.operations.index(operation)].name]
    result.notes.append(f"its ONNX nodes: {', '.join(operation.nodes)}")
    nodes = {node.name or node.output[0]: node for node in model.graph.node}
    mask, nonfinite = np.asarray(feeds[MASK], bool), result.error.error is None
    last = nodes[operation.nodes[-1]]
    deviation = Deviation(GraphIndex(model), last, got[result.tensor], expected, mask, nonfinite)
    result.cause, result.advice = likely_cause(deviation)
    return result


def compare_kernel(operation: Operation, name: str, got: Array, expected: Array) -> TensorError:
    """Compare a tensor by its largest deviation; codes that differ by a step, by their share."""
    off, largest = np.abs(got.astype(np.float64) - expected), float(np.abs(expected).max(initial=1e-30))
    if not np.isfinite(off).all():
        return TensorError(tensor=name, error=None, limit=HALF_LIMIT)
    deviation = float(off.max(initial=0)) / largest
    if expected.dtype != np.int8:
        return TensorError(tensor=name, error=deviation, limit=HALF_LIMIT)
    if off.max(initial=0) > LIMIT_STEP:
        return TensorError(tensor=name, error=deviation, limit=LIMIT_STEP / largest)
    share = LIMIT_FRACTION
    if isinstance(operation, Linear) and operation.activation is not None:
        zero = float(expected.min(initial=0)) if operation.center else 0.0
        share += GELU_ERROR * float(np.abs(expected - zero).mean())
    return TensorError(tensor=name, error=float((off > 0).mean()), limit=max(share, FEW_CODES / off.size))


@dataclass
class _Search:
    """The search inside of one block, the result's."""

    stitched: blocks.Stitched
    feeds: Feeds
    run_engine: GraphRunner
    run_reference: GraphRunner
    mask: Array
    result: BisectResult

    def __post_init__(self) -> None:
        self.block = blocks.block_of(self.stitched, str(self.result.block))
        self.limit = min(INNER_LIMIT, self.result.blocks[self.block.name].limit)
        self.alone = blocks.extract(self.stitched, self.block.name)
        self.index = GraphIndex(self.alone)
        self.got: dict[str, Array] = {}
        self.expected: dict[str, Array] = {}
        self.good: list[TensorError] = []

    def run(self) -> None:
        """Mark tensors chunk by chunk until one is wrong; record it, or where the fault vanished."""
        result, output = self.result, self.block.output
        candidates = [name for name in blocks.computed_floats(self.alone) if name != output]
        vanished: list[str] = []
        for start in range(0, len(candidates), PER_STEP):
            chunk = candidates[start : start + PER_STEP]
            wrong = next((row for row in self._compare(chunk) if self._jumps(row)), None)
            if wrong is not None:
                result.error, result.tensor = wrong, wrong.tensor
                break
            if self._output_holds() and not vanished:
                vanished = chunk
        if result.tensor is None:
            result.vanished = bool(vanished)
            result.tensor = self._mender(vanished) if vanished else output
            result.error = result.blocks[self.block.name]
        if vanished:
            result.notes.append(
                f"the fault vanishes while {', '.join(vanished)} are outputs, which changes what the builder "
                "fuses: a fused kernel is at fault rather than the graph"
            )
        above = nodes_before(self.index, str(result.tensor))
        result.before = next((row for row in reversed(self.good) if row.tensor in above), None)

    def _compare(self, chunk: Iterable[str]) -> list[TensorError]:
        marked = blocks.extract(self.stitched, self.block.name, chunk)
        names = {value.name for value in marked.graph.input}
        feeds = {name: array for name, array in self.feeds.items() if name in names}
        self.got, self.expected = self.run_engine(marked, feeds), self.run_reference(marked, feeds)
        self.result.engines += 1
        return [compare_tensors(t, self.got[t], self.expected[t], self.mask, self.limit) for t in chunk]

    def _mender(self, chunk: list[str]) -> str:
        """Return the first tensor of a chunk whose mark alone makes the fault vanish."""
        start = self.block.input
        own = [t for t in chunk if start is None or start in nodes_before(self.index, t)]
        for tensor in own or chunk:
            self._compare([tensor])
            if self._output_holds():
                return tensor
        return (own or chunk)[0]

    def _jumps(self, row: TensorError) -> bool:
        """Return whether a tensor is wrong and its sources are not; else keep it among the good ones."""
        above = nodes_before(self.index, row.tensor)
        sources = [good for good in self.good if good.tensor in above]
        error = max((good.error or 0.0 for good in sources), default=0.0)
        systematic = max((good.systematic for good in sources), default=0.0)
        wrong = (
            row.error is None
            or (row.error > row.limit and row.error > JUMP * error)
            or (row.systematic > row.systematic_limit and row.systematic > JUMP * systematic)
        )
        if not wrong:
            self.good.append(row)
        return wrong

    def _output_holds(self) -> bool:
        output, limit = self.block.output, self.result.blocks[self.block.name].limit
        return compare_tensors(output, self.got[output], self.expected[output], self.mask, limit).holds

    def explain(self, layers: Sequence[LayerRow]) -> None:
        """Record what made the tensor that `run` found: node, kernels and likely cause."""
        result, index, name = self.result, GraphIndex(self.stitched.model), str(self.result.tensor)
        node = index.producers[name.removesuffix(blocks.TURNED_BACK).removesuffix(blocks.OF_HEAD)]
        result.node, result.operator = node.name, node.op_type
        result.layers = [row.name for row in layers if node.name in row.onnx or node.name in row.name]
        nonfinite = result.error is not None and result.error.error is None
        got, expected = self.got.get(name), self.expected.get(name)
        evidence = Deviation(index, node, got, expected, self.mask, nonfinite)
        result.cause, result.advice = likely_cause(evidence)


def nodes_before(index: GraphIndex, tensor: str) -> set[str]:
    _, *before = index.back(tensor, lambda node: node.input, sys.maxsize)
    return {name for name, _ in before}


def bisect_lines(result: BisectResult) -> list[str]:
    lines = [f"{name}: {_error_text(row)}" for name, row in result.blocks.items()]
    if result.block is None:
        return [*lines, "no block is wrong", *result.notes]
    assert result.error is not None
    lines += [
        f"first bad block: {result.block}",
        f"first bad tensor: {result.tensor} ({_error_text(result.error)})",
        f"made by: {result.node} ({result.operator})",
    ]
    if result.before is not None:
        lines.append(f"last good tensor before it: {result.before.tensor} ({_error_text(result.before)})")
    lines.append(f"engine layers: {', '.join(result.layers) or 'none names it'}")
    lines.append(f"likely cause: {result.cause}")
    if result.advice:
        lines.append(f"what to do: {result.advice}")
    built = [f"{result.engines} engines were built for this"] if result.engines else []
    return [*lines, *result.notes, *built]


def _error_text(row: TensorError) -> str:
    if row.error is None:
        return "NaN or infinite"
    return f"relative error {row.error:.3g}, limit {row.limit:.3g}{'' if row.holds else ', WRONG'}"


def run_onnxruntime(model: onnx.ModelProto, feeds: Feeds) -> dict[str, Array]:
    session = session_of(model.SerializeToString(), "the cut graph")
    names = [value.name for value in model.graph.output]
    wanted = {value.name for value in model.graph.input}
    made = session.run(names, {name: array for name, array in feeds.items() if name in wanted})
    return dict(zip(names, made, strict=True))


def bisect_run(folder: Path) -> BisectResult:
    """Find the first tensor that the engine of a run directory gets wrong, on this machine.

    Raises:
        MissingDevice: no GPU, or no library to run engines with.
        UserError: no run directory, no engine in it, or one that is not for this machine.
    """
    session = Session(read_config(folder), folder)
    built = outcomes.read_built(folder)
    if find_gpu() is None and (isinstance(built, outcomes.Skipped) or not built.on_cpu):
        raise MissingDevice("bisecting runs engines, and CUDA shows no GPU here; run it on the engine's GPU")
    if isinstance(built, outcomes.Skipped):
        raise UserError(f"{folder} has no engine ({built.skipped}); build it first")
    path = graphs.graph_path(session)
    sidecar = check_sidecar(folder / "engine" / built.file, path)
    gemms = graphs.expected_gemms(session)

    def run_engine(model: onnx.ModelProto, feeds: Feeds) -> dict[str, Array]:
        with engine_of(model, sidecar, gemms) as (engine, _):
            return engine.run(feeds)

    _, encoded = next(iter(session.eval_splits.values()))
    case = block_cases(encoded.lengths, widest(sidecar.profiles), session.config.seed)[0]
    batch = batch_of(encoded, case, session.pad_id)
    if built.backend == "cuda":
        engine, _ = load_kernels(folder / "engine" / built.file)
        return bisect_kernels(engine, read_model(path), batch, session.plan.family)
    verified = read_verified(folder)
    rows = [] if isinstance(verified, outcomes.Skipped) else verified.blocks
    with blocks.open_reference(session) as (reference, fp32):
        half = computes_fp16(session.recipe, built.backend)
        tensors = blocks.reference_blocks(reference, fp32, batch, half=half)
    return bisect(
        path,
        select_inputs(reference, batch),
        run_engine,
        run_onnxruntime,
        family=session.plan.family,
        tensors=tensors,
        suspects={row.name for row in rows if not row.holds},
        layers=built.layers,
    )
