"""Measure engines with INT8 in different places, the data of the cost model: random weights, random ids.

Only latency is measured, so one calibration on random token ids serves all placements of a model. The rows of
an engine are added to the file as soon as it is done; what is in the file already is not measured again.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qdqbench.eval.bench import target as random_model
from qdqbench.eval.bench.clocks import GpuMonitor, gpu_uuid
from qdqbench.eval.bench.measure import (
    OpenEngine,
    ReadyGraph,
    Shape,
    alone_on_gpu,
    measure_speedup,
    open_engine,
    write_engine_graph,
)
from qdqbench.eval.placement.cost_fit import read_rows
from qdqbench.eval.placement.cost_model import CostRow, shape_of
from qdqbench.eval.placement.random import Chosen, choose_placements, columns
from qdqbench.eval.placement.space import PLAIN, Space, make_space
from qdqbench.quantize.calibrate import ptq
from qdqbench.quantize.calibrate.narrow import narrowed
from qdqbench.quantize.calibrate.record import CalibrationRecord
from qdqbench.quantize.core.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.core.limits import limits_of
from qdqbench.quantize.core.speedup import Speedup
from qdqbench.quantize.encoders.modules import module_table
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.engine.profiles import choose_profile
from qdqbench.quantize.families.shapes import MODEL_SHAPES
from qdqbench.quantize.machine.gpu import find_gpu
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe, load_recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.rundir.artifacts import engine_profiles
from qdqbench.quantize.rundir.session import RunConfig, Session

BASE_RECIPE = "bert-int8-attention"  # its export, profiles and backend; every placement is a part of it
MEASURED_MODELS = ("minilm", "bert-base", "bert-large")


@dataclass(frozen=True)
class Done:
    """What a measurement added."""

    rows: int
    engines: int
    ended: str


def measure_costs(  # noqa: PLR0913
    model: str,
    shapes: Sequence[Shape],
    out: Path,
    *,
    placements: int,
    seed: int,
    budget_s: float | None,
    say: Callable[[str], None],
    on_gpu: bool = True,  # tests have none
    clock: Callable[[], float] = time.monotonic,
) -> Done:
    """Measure one model's placements, one process, each beside its FP16 twin.

    Args:
        model: a name of MEASURED_MODELS, or a model folder.
        shapes: (batch, length), within the profile of the recipe.
        out: file of rows; added to.
        placements: fixed ones first (all, all with attention, each kind alone), then random ones.
        seed: of weights, inputs and placements.
        budget_s: no engine is started that would not end within it, by the longest one so far.

    Raises:
        MissingDevice: no GPU.
        UserError: the model or a shape cannot be used.
    """
    start = clock()
    machine = _machine() if on_gpu else ("fake GPU", "fake", "0")
    known = read_rows(out) if out.is_file() else []
    _drop_torn_line(out)
    folder = Path(tempfile.mkdtemp(prefix="qdqbench-cost-"))
    try:
        session = _session(model, folder, seed)
        _check_shapes(session, shapes)
        space = make_space(
            session.recipe, module_table(session.fp32_model), session.fp32_model.base_model_prefix
        )
        record = random_model.calibrate_random_ids(session)  # one for all placements
        twin = write_engine_graph(
            session, session.fp32_model, session.recipe, Plan(), folder / "twin.onnx"
        ).path
        with (
            alone_on_gpu() if on_gpu else contextlib.nullcontext(),
            GpuMonitor(gpu_uuid() if on_gpu else None) as monitor,
            open_engine(session, ReadyGraph(twin, [], 0), folder / "baseline", shapes) as baseline,
        ):
            job = _Job(
                session, space, record, baseline, list(shapes), monitor, out, machine, Path(model).name
            )
            return _run(job, known, placements, seed, (start, budget_s, clock), say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _drop_torn_line(path: Path) -> None:
    """Remove what a killed writer left behind the last whole line; `read_rows` passes it over."""
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


@dataclass
class _Job:
    """What every engine needs."""

    session: Session
    space: Space
    record: CalibrationRecord
    baseline: OpenEngine
    shapes: list[Shape]
    monitor: GpuMonitor
    out: Path
    machine: tuple[str, str, str]
    name: str

    def measure(self, chosen: Chosen, shapes: Sequence[Shape]) -> dict[Shape, tuple[Speedup, float | None]]:
        """Speedup and GPU clock of one placement."""
        units, attention = chosen
        recipe = self.space.assemble(set(units), set(attention), PLAIN)
        plan = resolve(recipe, self.space.modules, self.space.prefix)
        model = self.session.new_int8_model()
        ptq.restore(model, plan, narrowed(plan, self.record, self.record))
        exported = write_engine_graph(self.session, model, recipe, plan, self.session.folder / "placed.onnx")
        del model
        clocks: dict[Shape, float | None] = {}
        found = {}
        with open_engine(self.session, exported, self.session.folder / "trial", self.shapes) as engine:
            require_int8(engine.result)
            for shape in shapes:
                begin = time.time()
                found[shape] = measure_speedup(engine, self.baseline, shape)
                clocks[shape] = self.monitor.during([(begin, time.time())]).clock_mhz
        return {shape: (latency, clocks.get(shape)) for shape, latency in found.items()}

    def append(self, placed: dict[str, str], found: dict[Shape, tuple[Speedup, float | None]]) -> None:
        """Write the rows of one engine, at once."""
        gpu, backend, version = self.machine
        text = ""
        for (batch, length), (latency, clock_mhz) in found.items():
            row = CostRow(
                name=self.name,
                model=shape_of(self.session.fp32_model.config),
                batch=batch,
                length=length,
                placement=placed,
                ms_int8=latency.system_ms,
                ms_fp16=latency.baseline_ms,
                gpu=gpu,
                backend=backend,
                version=version,
                clock_mhz=clock_mhz,
            )
            text += row.model_dump_json() + "\n"
        with self.out.open("a", encoding="utf-8") as stream:
            stream.write(text)


def _run(  # noqa: PLR0913, PLR0917
    job: _Job,
    known: Sequence[CostRow],
    placements: int,
    seed: int,
    time_limit: tuple[float, float | None, Callable[[], float]],
    say: Callable[[str], None],
) -> Done:
    start, budget_s, clock = time_limit
    family, layers = job.space.family, {layer for layer, _ in job.space.units}
    runs = family.run_order(len(layers), int(job.session.fp32_model.config.num_hidden_layers))
    rows = engines = failed = 0
    longest = 0.0
    for number, chosen in enumerate(choose_placements(job.space, placements, seed), 1):
        placed = columns(chosen, runs)
        have = {
            (row.batch, row.length)
            for row in known
            if (row.name, row.placement, row.machine) == (job.name, placed, job.machine)
        }
        missing = [shape for shape in job.shapes if shape not in have]
        if not missing:
            continue
        begin = clock()
        if budget_s is not None and begin - start + longest > budget_s:
            return Done(
                rows, engines, f"stopped at {begin - start:.0f} s of {budget_s:g} s, {failed} engines failed"
            )
        try:
            found = job.measure(chosen, missing)
        except (CheckFailed, UserError, RuntimeError) as error:
            if "CUDA error" in str(error):
                raise  # nothing runs on the GPU after it
            failed += 1
            say(f"{number} of {placements}: failed: {' '.join(str(error).split())[:300]}")
            continue
        finally:
            longest = max(longest, clock() - begin)
        job.append(placed, found)
        rows += len(found)
        engines += 1
        said = ", ".join(
            f"b{b} s{n} {each.system_ms:.3f} ms {each.value:.2f}x" for (b, n), (each, _) in found.items()
        )
        say(f"{number} of {placements}: {sum(map(len, chosen))} parts in INT8: {said}")
    return Done(rows, engines, f"all placements are measured, {failed} engines failed")


def _session(model: str, folder: Path, seed: int) -> Session:
    """A session without data: the recipe's export and engine, and the model."""
    source, own = model, model in MEASURED_MODELS
    if own:
        source = str(folder / "model")
        random_model.write_random_model(folder / "model", MODEL_SHAPES[model], seed)
    config = RunConfig(
        recipe=_plain(BASE_RECIPE),
        model=source,
        task=random_model.random_ids_task(None if own else model),
        data="none",
        seed=seed,
        command="qdqbench cost measure",
    )
    session = Session(config, folder)
    sizes = {i.head_size for i in module_table(session.fp32_model).values() if i.kind == "Attention"}
    allowed = limits_of(config.recipe.engine.backend).int8_head_sizes
    if not sizes <= set(allowed):  # the attention of such a model cannot be INT8
        linears = _plain("bert-int8-linears")
        session = Session(config.model_copy(update={"recipe": linears}), folder)
    return session


def _plain(name: str) -> Recipe:
    """A shipped recipe with the calibration that takes the least time: no kernel depends on it."""
    return load_recipe(name).model_copy(update={"calibration": Calibration()})


def _check_shapes(session: Session, shapes: Sequence[Shape]) -> None:
    for batch, length in shapes:
        try:
            choose_profile(engine_profiles(session), batch, length)
        except CheckFailed as error:
            raise UserError(f"--batch {batch} --length {length}: {error}") from error


def _machine() -> tuple[str, str, str]:
    """GPU, backend and version.

    Raises:
        MissingDevice: lists what is missing.
    """
    import torch

    gpu = find_gpu()
    if gpu is None or not torch.cuda.is_available():
        missing = "CUDA shows no NVIDIA GPU here" if gpu is None else "this torch has no CUDA"
        raise MissingDevice(f"`qdqbench cost measure` times engines on a GPU: {missing}")
    chosen = choose_backend("auto")
    return gpu.name, chosen.name, chosen.version
