"""Run an engine on real samples in every shape that it is for, and its blocks on the reference's own inputs.

`checks.py` judges what comes out, `cases.py` says what goes in. Only `verify_engine` needs a GPU.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from qdqbench.eval.metrics.logits import read_logits
from qdqbench.eval.verification.blocks import Uncut, reference_blocks, stitch
from qdqbench.eval.verification.cases import (
    InputCase,
    batch_of,
    block_cases,
    fitting_samples,
    padding_answers,
    shape_cases,
    widest,
)
from qdqbench.eval.verification.checks import (
    BlockSums,
    QuantizationCost,
    check_answers,
    check_padding,
    check_shape,
    verification_failures,
)
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.hazards import find_hazards
from qdqbench.quantize.engine.runtime.cpu import CpuEngine
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.engine.runtime.runners import open_engine, open_runner
from qdqbench.quantize.engine.sidecar import Sidecar, check_sidecar
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.pipeline.artifacts import Skipped, expected_gemms, graph_path, read_built
from qdqbench.quantize.utils.arrays import Floats, Int64
from qdqbench.quantize.utils.errors import MissingDevice
from qdqbench.quantize.utils.progress import report_phase, track
from qdqbench.quantize.utils.results import (
    BlockCheck,
    EngineResult,
    PaddingCheck,
    ShapeCheck,
    Verification,
)

if TYPE_CHECKING:
    from qdqbench.eval.metrics.runners import Predict
    from qdqbench.quantize.engine.profiles import Profile
    from qdqbench.quantize.engine.sidecar import Sidecar
    from qdqbench.quantize.pipeline.session import Session
    from qdqbench.quantize.tasks.types.encoded import Encoded


@contextmanager
def engine_of(
    model: onnx.ModelProto, sidecar: Sidecar, expected_gemms: Iterable[str] = ()
) -> Iterator[tuple[Engine | CpuEngine, EngineResult]]:
    """Build a cut graph as the deployed engine was built, load it, and remove it afterwards.

    Args:
        sidecar: of the deployed engine: its backend and shapes.
        expected_gemms: MatMul and Gemm nodes that must be in INT8; absent ones are passed over.

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
        with open_engine(engine, path) as loaded:
            yield loaded, result


SAMPLES, PADDING_SAMPLES = 256, 16


@dataclass
class _Data:
    """What a verification compares with, of the first evaluation split."""

    encoded: "Encoded"
    reference: Floats
    fp32: Floats
    samples: Int64  # drawn, of those whose rows all fit

    @property
    def rows(self) -> Int64:
        """Of the drawn samples."""
        return self.encoded.rows_of(self.samples)


def verify_engine(session: "Session") -> Verification:
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
    with open_runner(path, graph, pad_id=session.pad_id, outputs=session.config.task.kind.outputs) as runner:
        asked = ask(session, runner, sidecar.profiles)
    blocks: list[BlockCheck] = []
    uncut, gemms = None, built.int8_gemms
    try:
        blocks, gemms = _run_blocks(session, sidecar, asked.data)
    except Uncut as error:
        uncut = str(error)
    found = judged(session, asked, built, blocks, uncut)
    if gemms != built.int8_gemms:
        found.stitched_int8_gemms = gemms
        found.warnings.append(
            f"the blocks were judged in an engine with {gemms} INT8 GEMMs, the deployed one has "
            f"{built.int8_gemms}: cutting it changed what the builder fuses"
        )
    return found


@dataclass
class EngineAnswers:
    """What an engine answered, beside what it is held to."""

    data: _Data
    cost: QuantizationCost
    shapes: list[ShapeCheck]
    padding: PaddingCheck
    got: Floats  # answers to the drawn rows


def ask(session: "Session", run: "Predict", profiles: "Sequence[Profile]") -> EngineAnswers:
    """Ask an engine of these profiles for its answers; the questions depend on the session alone.

    Raises:
        UserError: it takes no sample.
    """
    data = _data(session, widest(profiles).max[1])
    cost = QuantizationCost.of(data.reference, data.fp32)
    shapes = _run_shapes(run, data, profiles, session)
    chosen = data.rows[:PADDING_SAMPLES].tolist()
    answers = padding_answers(run, data.encoded, chosen, profiles, session.pad_id)
    return EngineAnswers(
        data, cost, shapes, check_padding(answers, cost), _run_rows(run, data, profiles, session)
    )


def judged(
    session: "Session", asked: EngineAnswers, built: EngineResult, blocks: list[BlockCheck], uncut: str | None
) -> Verification:
    """Whether what an engine answered is right; `uncut` is why its blocks were not run."""
    data, task, seed = asked.data, session.config.task, session.config.seed
    places, part = data.encoded.answers_of(data.rows), data.encoded.part(data.samples)
    found = Verification(
        reference="fake_quant" if session.recipe.quantizes else "fp32",
        seed=seed,
        blocks=blocks,
        blocks_not_checked=uncut,
        stitched_int8_gemms=built.int8_gemms,
        shapes=asked.shapes,
        padding=asked.padding,
        answers=check_answers(
            task,
            asked.got,
            data.reference[places],
            data.fp32[places],
            part.gold,
            samples=part.sample_of_answers,
            cost=asked.cost,
            max_drop=session.recipe.gate.max_drop,
            seed=seed,
        ),
        warnings=[
            text for cc in built.compute_capability for text in find_hazards(built.backend, built.version, cc)
        ],
        failures=[],
        passed=True,
    )
    lines = verification_failures(found, str(session.folder))
    return found.model_copy(update={"failures": lines, "passed": not lines})


def _data(session: "Session", longest: int) -> _Data:
    """Logits that earlier stages left, and a seeded draw of the samples that fit the engine."""
    split, (_, encoded) = next(iter(session.eval_splits.items()))
    name = "fake_quant" if session.recipe.quantizes else "fp32"
    reference, fp32 = (
        read_logits(session.folder / "logits" / f"{stage}.npz")[split] for stage in (name, "fp32")
    )
    fitting = fitting_samples(encoded.longest, longest)
    drawn = np.random.default_rng(session.config.seed).permutation(fitting)[:SAMPLES]
    return _Data(encoded, reference, fp32, drawn)


def _run_shapes(
    run: "Predict", data: _Data, profiles: "Sequence[Profile]", session: "Session"
) -> list[ShapeCheck]:
    cases = shape_cases(data.encoded.lengths, profiles, session.config.seed)
    found = []
    for case in track("shapes", cases):
        got = run(batch_of(data.encoded, case, session.pad_id))
        shape = (len(case.rows), case.length)
        rows = np.array(case.rows)
        reference = data.reference[data.encoded.answers_of(rows)]
        found.append(check_shape(data.encoded.kept(rows, got), reference, shape, case.what))
    return found


def _run_rows(run: "Predict", data: _Data, profiles: "Sequence[Profile]", session: "Session") -> Floats:
    """Answers to the drawn samples, in batches of the first profile's opt, in random order and so padded."""
    profile, drawn, parts = widest(profiles), data.rows, []
    for start in track("answers", range(0, len(drawn), profile.opt[0])):
        rows = drawn[start : start + profile.opt[0]]
        filled = np.resize(rows, max(len(rows), profile.min[0])).tolist()
        length = max(profile.min[1], int(data.encoded.lengths[rows].max()))
        made = run(batch_of(data.encoded, InputCase("drawn", filled, length), session.pad_id))[: len(rows)]
        parts.append(data.encoded.kept(rows, made))
    return np.concatenate(parts)


def _run_blocks(session: "Session", sidecar: "Sidecar", data: _Data) -> tuple[list[BlockCheck], int]:
    """Build the stitched engine, feed it the reference's block inputs, and judge each block."""
    from qdqbench.quantize.calibration.fakequant.native import use_frozen_weights

    family = session.plan.family
    stitched = stitch(read_model(graph_path(session)), family)
    half = np.dtype(np.float16) in stitched.types.values()
    quantized = session.recipe.quantizes
    model = session.fake_quant_model if quantized else session.fp32_model
    sums = {block.name: BlockSums(block.name) for block in stitched.blocks}
    profile = widest(sidecar.profiles)
    cases = block_cases(data.encoded.lengths, profile, session.config.seed)
    report_phase("building the engine of blocks")
    with (
        use_frozen_weights(model) if quantized else nullcontext(),
        session.fp32_shifted() if quantized else nullcontext() as fp32,
        engine_of(stitched.model, sidecar, expected_gemms(session)) as (engine, built),
    ):
        for case in track("blocks", cases):
            batch = batch_of(data.encoded, case, session.pad_id)
            tensors = reference_blocks(model, fp32, batch, half=half)
            inputs = {name: t.input for name, t in tensors.items() if t.input is not None}
            got = engine.run(select_inputs(model, batch) | stitched.feeds(inputs))
            for block in stitched.blocks:
                made = tensors[block.name]
                mask = batch["attention_mask"]
                sums[block.name].add(got[block.output], made.output, made.unquantized, mask)
    return [each.check() for each in sums.values()], built.int8_gemms
