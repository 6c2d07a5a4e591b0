"""Run an engine on samples in every shape that it is for, and its blocks on the reference's own inputs."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import onnx

from qdqbench.eval.metrics.logits import read_logits
from qdqbench.eval.metrics.runners import Predict
from qdqbench.eval.verification import checks
from qdqbench.eval.verification.blocks import Uncut, check_blocks, open_reference, stitch
from qdqbench.eval.verification.results import BlockCheck, Verification
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.hazards import find_hazards
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.engine.runtime.runners import CompiledEngine, open_engine, open_runner
from qdqbench.quantize.engine.sidecar import Sidecar, check_sidecar
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.pipeline.graphs import expected_gemms, graph_path
from qdqbench.quantize.pipeline.outcomes import Skipped, read_built
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.standalone.texts import pad_batch
from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.utils.arrays import Array, Floats, Int64
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.progress import report_phase, track

SAMPLES, PADDING_SAMPLES, BLOCK_SAMPLES = 256, 16, 32


@dataclass
class InputCase:
    """One batch to run: samples, and the length that they are padded to."""

    what: str
    rows: list[int]  # samples; repeated where the data has fewer than the batch
    length: int


def widest(profiles: Sequence[Profile]) -> Profile:
    """Return the profile that takes the longest samples, and of those the largest batch."""
    return max(profiles, key=lambda profile: (profile.max[1], profile.max[0]))


def shape_cases(lengths: Int64, profiles: Sequence[Profile], seed: int) -> list[InputCase]:
    """Return batches at each corner of the profiles, padded and of equal lengths, shortest and longest."""
    random = np.random.default_rng(seed)
    cases: dict[tuple[str, int, int], InputCase] = {}

    def add(what: str, rows: Array, batch: int, length: int) -> None:
        chosen = np.resize(random.permutation(rows), batch).tolist()
        cases.setdefault((what, batch, length), InputCase(what, chosen, length))

    for profile in profiles:
        low, high = profile.min[1], profile.max[1]
        fitting = np.flatnonzero(lengths <= high)
        if not len(fitting):
            continue
        batches = dict.fromkeys((profile.min[0], profile.opt[0], profile.max[0]))
        within = lengths[fitting]
        common = np.bincount(within[within >= low], minlength=1)
        for batch in batches:
            for length in dict.fromkeys((low, profile.opt[1], high)):
                if len(rows := np.flatnonzero(lengths <= length)):
                    add("padded", rows, batch, length)
            if common.any():
                length = int(common.argmax())
                add("equal lengths", np.flatnonzero(lengths == length), batch, length)
        for what, length in (("shortest", int(within.min())), ("longest", int(within.max()))):
            add(what, np.flatnonzero(lengths == length)[:1], profile.min[0], max(low, length))
    return list(cases.values())


def fitting_samples(lengths: Int64, longest: int) -> Int64:
    """Return the samples that an engine takes, of at least one.

    Raises:
        UserError: all are longer.
    """
    found = np.flatnonzero(lengths <= longest)
    if not len(found):
        raise UserError(
            f"the engine takes at most {longest} tokens, and the shortest of {len(lengths)} samples has "
            f"{lengths.min()}, so none fits; raise the length of engine.shapes"
        )
    return found


def block_cases(lengths: Int64, profile: Profile, seed: int) -> list[InputCase]:
    """Return batches for the blocks: mixed lengths with the extremes, equal lengths, the shortest.

    Raises:
        UserError: no sample fits the profile.
    """
    random, (low, high) = np.random.default_rng(seed), (profile.min[1], profile.max[1])
    fitting = fitting_samples(lengths, high)
    order = fitting[np.argsort(lengths[fitting], kind="stable")]
    batch = int(np.clip(BLOCK_SAMPLES, profile.min[0], profile.max[0]))
    others = random.permutation(fitting)[: max(0, batch - 2)]
    mixed = np.resize(np.unique([order[0], order[-1], *others]), batch)
    again = np.resize(random.permutation(fitting), batch)
    counts = np.bincount(lengths[fitting])
    equal = np.resize(np.flatnonzero(lengths == counts.argmax()), batch)
    alone = np.resize(order[:1], profile.min[0])
    drawn = (("padded", mixed), ("padded", again), ("equal lengths", equal), ("shortest", alone))
    return [InputCase(what, rows.tolist(), max(low, int(lengths[rows].max()))) for what, rows in drawn]


def batch_of(encoded: Encoded, case: InputCase, pad_id: int) -> dict[str, Int64]:
    _, batch = encoded.batch(case.rows, pad_id)
    return pad_batch(batch, case.length, pad_id)


def padding_answers(
    run: Predict, encoded: Encoded, rows: list[int], profiles: Sequence[Profile], pad_id: int
) -> Floats:
    """Return answers [3, answers, width] of rows alone, alone at the longest length, in a large batch."""
    (small, low), (large, high) = widest(profiles).min, widest(profiles).max
    lengths, together = encoded.lengths, np.resize(rows, large).tolist()
    rows = rows[:large]

    def alone(row: int, length: int) -> Floats:
        return _answer(run, encoded, InputCase("alone", [row] * small, max(low, length)), pad_id, 1)

    case = InputCase("together", together, max(low, int(lengths[together].max())))
    filled = _answer(run, encoded, case, pad_id, len(rows))
    short = np.concatenate([alone(row, int(lengths[row])) for row in rows])
    return np.stack([short, np.concatenate([alone(row, high) for row in rows]), filled])


def _answer(run: Predict, encoded: Encoded, case: InputCase, pad_id: int, n: int) -> Floats:
    answers: Floats = encoded.kept(np.array(case.rows[:n]), run(batch_of(encoded, case, pad_id))[:n])
    return answers


@contextmanager
def engine_of(
    model: onnx.ModelProto,
    sidecar: Sidecar,
    expected_gemms: Iterable[str] = (),
    runtime_cache: Path | None = None,
) -> Iterator[tuple[Engine | CompiledEngine, EngineResult]]:
    """Build a cut graph as the deployed engine was built, which `sidecar` tells, and load it in the block.

    Args:
        expected_gemms: MatMul and Gemm nodes that must be in INT8; absent ones are passed over.
        runtime_cache: that of the deployed engine, most of whose kernels the blocks have too.

    Raises:
        UserError: the builder refuses the graph.
        MissingDevice: no GPU or library to run it with.
    """
    names = {node.name for node in model.graph.node}
    with tempfile.TemporaryDirectory(prefix="qdqbench-blocks-") as name:
        path, engine = Path(name) / "blocks.onnx", Path(name) / "blocks.engine"
        path.write_bytes(model.SerializeToString())
        result = build(
            path,
            engine,
            backend=sidecar.backend,  # type: ignore[arg-type]
            profiles=sidecar.profiles,
            expected_gemms=[gemm for gemm in expected_gemms if gemm in names],
            expected_attention=0,
            strict=False,
            compute=sidecar.compute or "fp32",
        )
        with open_engine(engine, path, runtime_cache=runtime_cache) as loaded:
            yield loaded, result


@dataclass
class _Data:
    """References of a verification, of the first evaluation split."""

    encoded: Encoded
    reference: Floats
    fp32: Floats
    distinct: Int64  # samples
    samples: Int64  # drawn of them, of those whose rows all fit

    @property
    def rows(self) -> Int64:
        return self.encoded.rows_of(self.samples)


def verify_engine(session: Session) -> Verification:
    """Run the deployed engine and its blocks on the GPU, and judge what they compute.

    Raises:
        MissingDevice: no GPU or library to run it with.
        UserError: the engine is not for this machine, not of this run's ONNX file, or takes no sample.
    """
    built = read_built(session.folder)
    if isinstance(built, Skipped):
        raise MissingDevice(f"no engine was built: {built.skipped}")
    path, graph = session.folder / "engine" / built.file, graph_path(session)
    sidecar = check_sidecar(path, graph)
    rounding = checks.BF16_LIMIT if sidecar.compute == "bf16" else checks.MIN_LIMIT
    profiles, task, seed = sidecar.profiles, session.config.task, session.config.seed
    cache, pad_id = path.with_name("runtime.cache"), session.pad_id
    with open_runner(path, graph, pad_id=pad_id, runtime_cache=cache, outputs=task.kind.outputs) as run:
        data = _read_data(session, widest(profiles).max[1])
        told = data.encoded.answers_of(data.encoded.rows_of(data.distinct))
        cost = checks.QuantizationCost.of(data.reference[told], data.fp32[told], len(data.distinct), rounding)
        shapes = []
        for case in track("shapes", shape_cases(data.encoded.lengths, profiles, seed)):
            n, reference = len(case.rows), data.reference[data.encoded.answers_of(np.array(case.rows))]
            got = _answer(run, data.encoded, case, pad_id, n)
            shapes.append(checks.check_shape(got, reference, (n, case.length), case.what))
        few = data.rows[:PADDING_SAMPLES].tolist()
        padding = checks.check_padding(padding_answers(run, data.encoded, few, profiles, pad_id), cost)
        answers = _run_rows(run, data, profiles, session)
    blocks: list[BlockCheck] = []
    uncut, gemms = None, built.int8_gemms
    try:
        blocks, gemms = _run_blocks(session, sidecar, data, rounding, cache)
    except Uncut as error:
        uncut = str(error)
    places, part = data.encoded.answers_of(data.rows), data.encoded.part(data.samples)
    result = Verification(
        reference="fake_quant" if session.recipe.quantizes else "fp32",
        seed=seed,
        blocks=blocks,
        blocks_not_checked=uncut,
        stitched_int8_gemms=gemms,
        shapes=shapes,
        padding=padding,
        predictions=checks.check_answers(
            task,
            answers,
            data.reference[places],
            data.fp32[places],
            part.gold,
            samples=part.sample_of_answers,
            cost=cost,
            max_drop=session.recipe.gate.max_drop,
            seed=seed,
        ),
        warnings=[
            text for cc in built.compute_capability for text in find_hazards(built.backend, built.version, cc)
        ],
        failures=[],
        passed=True,
    )
    if gemms != built.int8_gemms:
        result.warnings.append(
            f"the blocks were judged in an engine with {gemms} INT8 GEMMs, the deployed one has "
            f"{built.int8_gemms}: cutting it changed what the builder fuses"
        )
    result.failures = checks.verification_failures(result, str(session.folder))
    result.passed = not result.failures
    return result


def _read_data(session: Session, longest: int) -> _Data:
    """Read the logits that earlier stages left, and draw samples that fit the engine."""
    split, (_, encoded) = next(iter(session.eval_splits.items()))
    name = "fake_quant" if session.recipe.quantizes else "fp32"
    reference, fp32 = (
        read_logits(session.folder / "logits" / f"{stage}.npz")[split] for stage in (name, "fp32")
    )
    distinct = encoded.distinct  # an engine rounds equal texts alike: more of them tell no more
    fitting = distinct[fitting_samples(encoded.longest[distinct], longest)]
    drawn = np.random.default_rng(session.config.seed).permutation(fitting)[:SAMPLES]
    return _Data(encoded, reference, fp32, distinct, drawn)


def turns(rows: Int64, lengths: Int64, profiles: Sequence[Profile]) -> list[tuple[Profile, Int64]]:
    """Share rows among profiles in turn, each a batch of its opt of rows that fit; one must take them all."""
    found, left, order = list[tuple[Profile, Int64]](), rows, cycle(profiles)
    while len(left):
        profile = next(order)
        fits = np.flatnonzero(lengths[left] <= profile.max[1])[: profile.opt[0]]
        found += [(profile, left[fits])] if len(fits) else []
        left = np.delete(left, fits)
    return found


def _run_rows(run: Predict, data: _Data, profiles: Sequence[Profile], session: Session) -> Floats:
    """Answer the drawn samples in batches of the profiles in turn, in random order and so padded."""
    encoded, parts = data.encoded, dict[int, Floats]()
    for profile, rows in track("answers", turns(data.rows, encoded.lengths, profiles)):
        filled = np.resize(rows, max(len(rows), profile.min[0])).tolist()
        case = InputCase("drawn", filled, max(profile.min[1], int(encoded.lengths[rows].max())))
        made = run(batch_of(encoded, case, session.pad_id))
        parts |= {row: encoded.kept(rows[[n]], made[[n]]) for n, row in enumerate(rows.tolist())}
    return np.concatenate([parts[row] for row in data.rows.tolist()])


def _run_blocks(
    session: Session, sidecar: Sidecar, data: _Data, rounding: float, runtime_cache: Path
) -> tuple[list[BlockCheck], int]:
    """Build the stitched engine, feed it the reference's block inputs, and judge each block."""
    from qdqbench.quantize.calibration.fakequant.native import use_frozen_weights

    stitched = stitch(read_model(graph_path(session)), session.plan.family)
    lengths, seed = data.encoded.lengths, session.config.seed
    taking = [profile for profile in sidecar.profiles if lengths.min() <= profile.max[1]]
    cases = [case for profile in taking for case in block_cases(lengths, profile, seed)]
    report_phase("building the engine of blocks")
    with (
        open_reference(session) as (model, fp32),
        nullcontext() if fp32 is None else use_frozen_weights(model),
        engine_of(stitched.model, sidecar, expected_gemms(session), runtime_cache) as (engine, built),
    ):
        batches = (batch_of(data.encoded, case, session.pad_id) for case in track("blocks", cases))
        return check_blocks(stitched, engine.run, model, fp32, batches, rounding), built.int8_gemms
