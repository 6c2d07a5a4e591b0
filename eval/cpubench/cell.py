"""Contestants of one cell on a CPU, with their threads pinned, ready to be measured."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from qdqbench.eval.bench.cell import BenchOptions, CellShape, Entry, Makers, gather, input_sets
from qdqbench.eval.bench.lanes import HostLane, WallTimer
from qdqbench.eval.bench.loop import Contestant
from qdqbench.eval.bench.results import BenchContestant, BenchRow
from qdqbench.eval.bench.target import Target
from qdqbench.eval.cpubench.contestants import OWN, contestants, table_of, why_absent
from qdqbench.eval.cpubench.made import Shared, Work


def cpu_makers() -> Makers:
    """Who takes part in a bench on a CPU, and what makes them ready."""
    shared = Shared()

    def prepare(
        target: Target,
        options: BenchOptions,
        shape: CellShape,
        listed: Sequence[BenchContestant],
        stack: ExitStack,
    ) -> list[Entry]:
        return _prepare(Work(target, options, shape, shared, stack), listed)

    return Makers(contestants, prepare)


def _prepare(work: Work, listed: Sequence[BenchContestant]) -> list[Entry]:
    """Make every contestant and run it once; `work.stack` holds what must be freed after the cell.

    Raises:
        MissingDevice: the runtime of the bench's own INT8 engine is not there.
    """
    import torch

    threads = torch.get_num_threads()
    work.stack.callback(torch.set_num_threads, threads)
    work.stack.callback(
        torch.compiler.reset
    )  # past a limit of shapes dynamo falls back to eager without a word
    pool = ThreadPoolExecutor(max(work.options.streams))
    work.stack.callback(pool.shutdown)
    kinds, timer = table_of(work.target, work.options), WallTimer(pool=pool)
    inputs = input_sets(work.target, work.options, work.shape)
    sets = [inputs] if work.shape.real else [[batch] for batch in inputs]

    def make(about: BenchContestant) -> Entry:
        kind = kinds[about.name]
        if reason := why_absent(kind):
            return Entry(BenchRow(contestant=about.name, status="skipped", reason=reason))
        made = kind.make(work)
        streams = () if work.shape.real else work.options.streams
        lanes = {
            count: [HostLane(run, sets) for run in made.lanes(count)]
            for count in dict.fromkeys((1, *streams))
        }
        for each in lanes.values():
            each[0].launch()  # what compiles when it first runs fails here, as a gap and not in a round
        built = made.built
        row = BenchRow(
            contestant=about.name,
            status="done",
            detail=made.detail,
            int8_gemms=built.int8_gemms if built else None,
            expected_int8_gemms=built.expected_int8_gemms if built else None,
            not_int8=built.not_int8 if built else [],
            engine_bytes=built.bytes if built else None,
        )
        more = {count: each for count, each in lanes.items() if count > 1 and len(each) == count}
        return Entry(
            row,
            Contestant(about.name, about.precision, lanes[1], timer, more),
            built.layers if built else [],
        )

    optional = {name for name, kind in kinds.items() if not kind.twin}
    return gather(make, listed, peers=optional - {OWN})
