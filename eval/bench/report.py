"""The report of a bench: its page, Markdown and screen, a section of the run's report, and rows of tables."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from qdqbench.eval.bench.results import (
    BENCH_FILE,
    OURS,
    TENSORRT_SYSTEMS,
    Bench,
    BenchConfig,
    BenchRow,
    config_label,
    cost_of,
    headline_of,
    is_of,
    list_speed,
    over_fastest,
    rate_of,
    read_bench,
    row_of,
    speedup_of,
)
from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.gate import judge_shapes
from qdqbench.eval.metrics.results import Speedup
from qdqbench.quantize.pipeline.session import CONFIG, read_config
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report import svg
from qdqbench.quantize.report.formats import cleaned, flat, known, label, model_label, size
from qdqbench.quantize.report.render import write_report
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import count_of

MARKERS = {  # by color, which is never the only difference
    svg.BLUE: {
        "int8": "o",
        "int8-exact": "P",
        "int8-openvino": "P",
        "int8-onnxruntime": "*",
        "int8-cuda": "*",
        **dict.fromkeys(TENSORRT_SYSTEMS[::2], "D"),
        **dict.fromkeys(TENSORRT_SYSTEMS[1::2], "d"),
    },
    svg.ORANGE: {"fp16": "s", "fp16-exact": "P", "bf16-openvino": "s", "fp32-openvino": "X"},
    svg.MUTED: {"fp32": "X", "fp32-onnxruntime": "X", "dynamic-onnxruntime": "p"},
    svg.SKY: {"torch-fp32": "v"},
    svg.GREEN: {"torch-fp16": "^", "torch-fp16-eager": "1", "torch-bf16": "^"},
    svg.PURPLE: {
        "compile-fp16": "D",
        "compile-fp16-eager": "2",
        "autotune-fp16": "*",
        "compile-fp32": "d",
        "compile-bf16": "D",
    },
    svg.VERMILLION: {"unpadded-fp16": "p", "unpadded-fp8": "P", "nncf-openvino": "h"},
}
SYSTEM_STYLES = {name: (color, mark) for color, marks in MARKERS.items() for name, mark in marks.items()}
OTHER_STYLE = (svg.VERMILLION, "8")  # INT8 by other recipes
STREAM_DASHES = ((0, ()), (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))  # by number of streams
SCREEN_CONFIGS = 4  # columns of configs that a terminal has room for
NAMED_RATIOS = (  # that tables show besides the headline
    ("int8", "fp16"),
    ("int8-exact", "fp16-exact"),
    *(("int8", name) for name in ("int8-cuda", *TENSORRT_SYSTEMS)),
    ("int8", "compile-fp16"),
    ("int8", "unpadded-fp16"),
    ("int8", "unpadded-fp8"),
    ("int8", "nncf-openvino"),
)
ENGINE_SHAPES = {
    "both": "engines for the recipe's shapes and for each shape alone",
    "exact": "engines for each shape alone",
    "recipe": "engines for the recipe's shapes",
}
GPU_UNITS = {"clock_mhz": "MHz", "power_w": "W", "temperature_c": "°C"}
QUICK = (
    "This is the quick bench that ends a run: a few shapes and one twin. `qdqbench bench RUN` adds other "
    "shapes, PyTorch and other quantizers."
)
Rows = list[tuple[str, list[doc.Cell]]]
Measurement = tuple[BenchConfig, BenchRow]


def latency_svg(bench: Bench) -> str:
    def draw(axes: Any, configs: list[BenchConfig]) -> None:
        for system in bench.systems:
            rows = [row_of(config, system.name) for config in configs]
            _line(axes, system.name, system.label, (row.median_ms if row else None for row in rows))

    return _panels(bench, "latency", "median latency", "ms", draw)


def speedup_svg(bench: Bench) -> str:
    """Return speed-ups of INT8 over each system by batch with 95% intervals, and over them the headline."""

    def draw(axes: Any, configs: list[BenchConfig]) -> None:
        axes.axhline(1, **svg.LIMIT_LINE, label="1 = as fast")
        for system in bench.systems:
            ratios = [speedup_of(config, "int8", system.name) for config in configs]
            _line(axes, system.name, system.label, (ratio.value if ratio else None for ratio in ratios))
            for place, ratio in enumerate(ratios):
                if ratio is not None and ratio.ci95_low is not None and ratio.ci95_high is not None:
                    color = SYSTEM_STYLES.get(system.name, OTHER_STYLE)[0]
                    axes.vlines(place, ratio.ci95_low, ratio.ci95_high, color=color, linewidth=3, alpha=0.4)
        best = [headline_of(bench.systems, config) for config in configs]
        if heights := [(place, ratio.value) for place, ratio in enumerate(best) if ratio is not None]:
            look = {"color": svg.INK, "marker": "_", "markersize": 16, "markeredgewidth": 2, "linestyle": ""}
            axes.plot(*zip(*heights, strict=True), **look, label="the fastest without INT8")

    if not any(ratio.system == "int8" for config in bench.configs for ratio in config.speedups):
        return ""
    title = f"speed-up of INT8{' by wall time' if bench.device == 'cpu' else ' over each'}"
    return _panels(bench, "speedup", title, "times as fast", draw)


def throughput_svg(bench: Bench) -> str:
    styles = dict(zip(bench.settings.streams, itertools.cycle(STREAM_DASHES), strict=False))

    def draw(axes: Any, configs: list[BenchConfig]) -> None:
        for system in bench.systems:
            for number, (streams, style) in enumerate(styles.items()):
                rates = (rate_of(config, system.name, streams) for config in configs)
                name = "_" if number else system.label  # matplotlib leaves it out of the legend
                _line(axes, system.name, name, rates, style)
        for streams, style in styles.items():
            axes.plot([], [], color=svg.MUTED, linestyle=style, label=count_of(streams, "stream"))

    if not any(row.throughput for config in bench.configs for row in config.rows):
        return ""
    return _panels(bench, "throughput", "sequences per second", "sequences/s", draw)


def _panels(
    bench: Bench, name: str, title: str, unit: str, draw: Callable[[Any, list[BenchConfig]], None]
) -> str:
    """Return a chart by batch with a panel for each length of several batches; empty without one."""
    fixed = [config for config in bench.configs if config.kind == "fixed"]
    lengths = [length for length, n in Counter(config.length for config in fixed).items() if n > 1]
    if not lengths or not any(row.status == "done" for config in fixed for row in config.rows):
        return ""
    rates = name == "throughput"
    figure = svg.figure_of(1.2 + 2.2 * len(lengths))
    for index, length in enumerate(lengths):
        axes = figure.add_subplot(len(lengths), 1, index + 1)
        configs = sorted((c for c in fixed if c.length == length), key=lambda config: config.batch)
        draw(axes, configs)
        svg.log_scale(axes, number=",.0f" if rates else "g")
        axes.set_ylabel(f"{unit}, log scale")
        axes.set_xticks(range(len(configs)), [str(config.batch) for config in configs])
        axes.set_xlim(-0.4, len(configs) - 0.6)
        axes.set_xlabel("batch")
        svg.dress(axes, f"{title}, {length} tokens")
    svg.legend(figure, 2, 2.4 if rates else 1.3)
    random = ", random weights" if bench.target.random_weights else ""
    return svg.svg_of(figure, f"bench-{name}", f"{title}, by batch{random}")


def _line(
    axes: Any, name: str, label: str, values: Iterable[float | None], style: Any = STREAM_DASHES[0]
) -> None:
    if points := [(place, value) for place, value in enumerate(values) if value is not None]:
        color, marker = SYSTEM_STYLES.get(name, OTHER_STYLE)
        look = {"color": color, "marker": marker, "markersize": 4.5, "linestyle": style}
        axes.plot(*zip(*points, strict=True), **look, label=label)


def write_bench_reports(bench: Bench, folder: Path) -> list[Path]:
    """Write `bench.md` and `bench.html`; of a run directory the caller writes the run's own report again."""
    return write_report(bench_report(bench), folder, "bench")


def bench_report(bench: Bench) -> doc.Report:
    bench = cleaned(bench)
    facts = {"Settings": flat(bench.settings.model_dump()), "Model": flat(bench.target.model_dump())}
    title = f"{model_label(bench.target.name)}{' (random weights)' if bench.target.random_weights else ''}"
    about = [str(bench.recipe.get("name", "recipe"))]
    return doc.Report(
        doc.page_of(bench, "speed", title, about, BENCH_FILE, facts=facts),
        [doc.Section("speed", "Speed", _blocks(bench))],
        _verdict(bench),
        tiles=[
            _tile(bench, config, ratio)
            for config in bench.configs[:5]
            if (ratio := headline_of(bench.systems, config)) is not None
        ],
        warnings=bench.warnings,
        notes=bench.notes,
    )


def _tile(bench: Bench, config: BenchConfig, ratio: Speedup) -> doc.Tile:
    over = f"{bench.labels[ratio.baseline]} {latency_cell(bench, config, ratio.baseline).text}"
    remark = f"{ratio.leading.interval} over {over} ms".strip()
    return doc.Tile(config_text(bench, config), figures.speed_text(ratio), remark, figures.speed(ratio).state)


def bench_blocks(found: Bench | str) -> list[doc.Block]:
    if isinstance(found, str):
        return [doc.Bullets([found], "bad")]
    bench = cleaned(found)
    random = " (random weights)" if bench.target.random_weights else ""
    failures = [*bench.errors, *slow_lines(bench)]
    return [
        *([doc.Bullets(failures, "bad")] if failures else []),
        f"{bench.target.name}{random}, {bench.recipe.get('name', 'recipe')}. {hardware(bench)}.",
        *([QUICK] if bench.settings.quick else []),
        *(doc.Prose(line, "unclear") for line in bench.warnings),
        *(doc.Prose(line, "quiet") for line in bench.notes),
        *_blocks(bench, timed=False),
    ]


def bench_of(folder: Path) -> Bench | str | None:
    """Return the bench of a run directory, or why it cannot be read; one of other files has an error."""
    if not (folder / BENCH_FILE).is_file():
        return None
    try:
        bench = read_bench(folder / BENCH_FILE)
    except UserError as error:
        return str(error)
    if stale := stale_files(bench, folder):
        again = f"{', '.join(stale)} changed after this bench: its figures are of other files, measure again"
        bench = bench.model_copy(update={"errors": [again, *bench.errors]})
    return bench


def stale_files(bench: Bench, folder: Path) -> list[str]:
    measured = {name: digest for name, digest in bench.target.files.items() if (folder / name).is_file()}
    stale = [name for name, digest in measured.items() if files.sha256(folder / name) != digest]
    if (folder / CONFIG).is_file() and not is_of(bench, read_config(folder).recipe.model_dump(mode="json")):
        stale.append("the recipe")
    return stale


def hardware(bench: Bench) -> str:
    found = bench.environment
    if bench.device == "cpu":
        cpu = bench.cpu
        features = f"; {', '.join(cpu.features) or 'instruction sets unknown'}" if cpu else ""
        where = f"CPU: {found.get('cpu', 'unknown')} ({found.get('cores', '?')} cores{features})"
        where += f", {count_of(count, 'thread')}" if (count := bench.settings.threads) else ""
    else:
        where = (
            f"{found.get('gpu', 'GPU')} (compute capability {bench.compute_capability}), "
            f"driver {found.get('driver') or 'unknown'}"
        )
    used = dict.fromkeys(system.backend.partition(" ") for system in bench.systems)
    return ", ".join([where, *(f"{label(name)} {version}".strip() for name, _, version in used)])


def clocks(bench: Bench) -> str:
    if bench.device == "cpu":
        loads = (bench.cpu.load_before, bench.cpu.load_after) if bench.cpu else (None, None)
        load = "" if None in loads else f"load average {loads[0]:g} before, {loads[1]:g} after; "
        return f"{load}clock and power: not read on a CPU"
    rows = [row for config in bench.configs for row in config.rows if row.status == "done"]
    parts = []
    for name, unit in GPU_UNITS.items():
        if values := [value for row in rows if (value := getattr(row, name)) is not None]:
            parts.append(f"{min(values):.0f} to {max(values):.0f} {unit}")
    return f"clock and power while measured: {', '.join(parts) or 'not read'}"


def slow_lines(bench: Bench) -> list[str]:
    """Return where INT8 is slower than the fastest other system or its FP16 engine, and why by the layers."""
    lines = []
    for config in bench.configs:
        first, same_backend = headline_of(bench.systems, config), speedup_of(config, "int8", "fp16")
        ratios = [first, same_backend if same_backend != first else None]
        if bench.device == "cpu":
            ratios = [ratio for ratio in config.speedups if ratio.system == "int8"]
        for ratio in ratios:
            if ratio is not None and ratio.leading.verdict == "slower":
                reasons = config.slow_reasons if ratio == same_backend else []
                what = f"{bench.labels[ratio.system]} is slower than {bench.labels[ratio.baseline]}"
                why = " by CPU time" * ratio.by_cpu_time + (f": {'; '.join(reasons)}" if reasons else "")
                lines.append(f"{config_text(bench, config)}: {what}, {figures.speed_text(ratio)}{why}")
    return lines


def method(bench: Bench) -> str:
    chosen = bench.settings
    effort = f"{chosen.iterations} launches" if chosen.iterations else f"{chosen.duration_s:g} s per system"
    kinds = {config.kind for config in bench.configs}
    inputs = (
        f"{chosen.input_sets} input sets of {chosen.inputs or 'random token ids'}"
        if "fixed" in kinds
        else "the rows of the split"
    )
    if bench.device == "gpu":
        timed, engines = "CUDA events around each launch", f"{ENGINE_SHAPES[chosen.engine_shapes]}; "
        timed += ", copies included for a data set" if "dataset" in kinds else ""
    else:
        timed = (
            "wall time of each call and CPU time of all threads, after a rest and calls that are not timed"
        )
        engines = f"threads: {chosen.threads} for all streams of a system, engines for any shape; "
    return (
        f"{chosen.rounds} interleaved rounds in one process ({effort}), order balanced, {timed}; "
        f"{inputs}, seed {chosen.seed}; {engines}INT8 scales from "
        f"{bench.target.calibration}. A speed-up is the ratio of the medians over rounds with its 95% "
        "bootstrap interval over rounds. Logits of every system were checked before and after."
    )


def config_text(bench: Bench, config: BenchConfig) -> str:
    name = config_label(config, label(bench.settings.dataset or ""))
    if config.kind == "fixed":
        return name
    return (
        f"{name} ({config.sequences} sequences, {1 - config.real_tokens / config.padded_tokens:.0%} padding)"
    )


def latency_cell(bench: Bench, config: BenchConfig, name: str) -> doc.Cell:
    tried = next((each for each in config.rows if each.system == name and each.status != "skipped"), None)
    if tried is None:
        return doc.Cell("not measured")
    if tried.status == "error":
        return doc.Cell("error", "bad")
    precision = next(system.precision for system in bench.systems if system.name == name)
    fault = " FP32" if tried.fp32_gemms(precision) else ""
    fault = fault if tried.in_best_form else " unfused"
    return doc.Cell(f"{figures.latency(tried.median_ms)}{fault}", doc.bad_unless(not fault))


def headline_title(bench: Bench) -> str:
    if bench.device == "cpu":
        return "INT8 over the fastest FP32 or BF16"
    engines_alone = len({system.backend for system in bench.systems}) == 1
    timed = {row.system for config in bench.configs for row in config.rows if row.status == "done"}
    fp8 = any(system.precision == "fp8" and system.name in timed for system in bench.systems)
    return f"INT8 over the fastest FP16{' engine' if engines_alone else ' or FP8' if fp8 else ''}"


def ratio_rows(bench: Bench) -> Rows:
    labels, configs = bench.labels, bench.configs
    measured = {(ratio.system, ratio.baseline) for config in configs for ratio in config.speedups}
    rows = [
        (f"{labels[a]} over {labels[b]}", [_short(speedup_of(config, a, b)) for config in configs])
        for a, b in NAMED_RATIOS
        if (a, b) in measured
    ]
    title = headline_title(bench).removeprefix("INT8 ")
    for name in labels:
        if bench.device == "gpu" and name.startswith("int8-") and name not in OURS:
            cells = [_short(over_fastest(bench.systems, config, name)) for config in configs]
            rows.append((f"{labels[name]} {title}", cells))
    return rows


def _short(ratio: Speedup | None) -> doc.Cell:
    return replace(figures.speed(ratio), short=figures.speed_text(ratio)) if ratio else doc.Cell()


def _verdict(bench: Bench) -> doc.Verdict:
    shapes = judge_shapes([*list_speed(bench)])
    text, state = figures.speed_verdict(shapes)
    if bench.errors or not bench.configs:
        state = "bad"
    lines: list[doc.Line] = [("Speed", text, state), ("Machine", hardware(bench), "")]
    best = [headline_of(bench.systems, config) for config in bench.configs]
    others = Counter(bench.labels[each.system] for each in best if each and each.system not in OURS)
    for fastest, count in others.items():
        where = f"{fastest} at {count} of {len(best)} shapes, not this recipe's backend"
        lines.append(("Fastest", where, ""))
    return doc.Verdict(
        state, _title(bench, shapes), failures=[*bench.errors, *slow_lines(bench)], lines=lines
    )


def _title(bench: Bench, shapes: Sequence[Speedup]) -> str:
    if bench.errors or not shapes:
        return "The measurement has errors" if bench.errors else "Nothing was measured"
    verdict = shapes[0].leading.verdict
    where = f" {figures.places(shapes)}" if verdict in ("slower", "inconclusive") else ""
    return f"Speed cannot be told{where}" if verdict == "inconclusive" else f"INT8 is {verdict}{where}"


def speed_table(speed: Sequence[Speedup], title: str = "") -> doc.Table:
    """Return every shape that was timed, the slowest first, with CPU time and conditions."""
    unit = "wall ms" if any(row.cpu for row in speed) else "ms"
    return doc.table_of(
        sorted(speed, key=lambda row: row.leading.value),
        ("batch x tokens", lambda row: row.config),
        ("times as fast", figures.speed),
        *([("by CPU time", figures.cpu_speed)] if any(map(figures.cpu_speed, speed)) else []),
        (f"INT8, {unit}", lambda row: doc.Cell(figures.latency(row), note=row.system)),
        (f"baseline, {unit}", lambda row: doc.Cell(figures.latency(row.baseline_ms), note=row.baseline)),
        ("measured", _conditions),
        title=title,
        texts=(0, -1),
        look="full cards",
        screen=range(4 + any(map(figures.cpu_speed, speed))),
        on=doc.EVERYWHERE,
    )


def _conditions(row: Speedup) -> doc.Cell:
    about = row.conditions
    when = about.created.replace("T", " ").replace("+00:00", " UTC") if about else ""
    parts = ["at the end of the run"] if row.quick else []
    parts += [f"{count_of(about.rounds, 'round')}"] if about else []
    parts += [count_of(about.threads, "thread")] if about and about.threads else []
    parts += [f"others took {row.other_cores:.1f} cores"] if row.other_cores else []
    return doc.Cell(when, note=", ".join(parts))


def _blocks(bench: Bench, *, timed: bool = True) -> list[doc.Block]:
    """Return tables and charts of a bench, with `timed` also what was timed of the same files before."""
    names = [config_text(bench, config) for config in bench.configs]
    medians = [
        (each.label, [latency_cell(bench, config, each.name) for config in bench.configs])
        for each in bench.systems
    ] + ratio_rows(bench)
    draws: list[Callable[[Bench], str]] = [latency_svg, speedup_svg, throughput_svg]
    interrupted = doc.Prose(
        "Interrupted: only the shapes that were finished are here.", "unclear", doc.EVERYWHERE
    )
    count = sum(len(config.rows) for config in bench.configs)
    blocks: list[doc.Block] = [] if bench.complete else [interrupted]
    if timed:
        blocks.append(speed_table([*list_speed(bench)], headline_title(bench)))
    rows = [doc.row(name, *cells) for name, cells in medians]
    blocks.append(doc.Table(["median latency, ms", *names], rows, look="full names"))
    if (price := bench.settings.cost_per_hour) is not None:
        costs = [
            doc.row(
                each.label, *(known(cost_of(config, each.name, price), ".4g") for config in bench.configs)
            )
            for each in bench.systems
        ]
        title = f"Cost of a million texts, at {price:g} an hour for the whole machine"
        blocks.append(doc.Table(["", *names], costs, title, look="full names", on=doc.EVERYWHERE))
    for part in (slice(first, first + SCREEN_CONFIGS) for first in range(0, len(names), SCREEN_CONFIGS)):
        rows = [doc.row(name, *cells[part]) for name, cells in medians]
        blocks.append(doc.Table(["median, ms", *names[part]], rows, on=doc.SCREEN))
    return [
        *blocks,
        doc.Prose(clocks(bench), on=doc.EVERYWHERE),
        doc.Columns([[doc.Chart(partial(draw, bench))] for draw in draws]),
        doc.Fold(f"Percentiles, throughput, clock and power of all {count} measurements", [_details(bench)]),
        doc.Prose(
            f"{method(bench)} Measured by `{bench.command}`; every number is in `{BENCH_FILE}`.", "quiet"
        ),
    ]


def _details(bench: Bench) -> doc.Table:
    task, labels = label(bench.settings.dataset or ""), bench.labels
    clocks, digits = (GPU_UNITS, 0) if bench.device == "gpu" else ({"cpu_ms": "CPU ms"}, 1)

    def rate(streams: int, each: Measurement) -> str:
        return known(rate_of(each[0], each[1].system, streams), ",.0f")

    def clock(name: str, each: Measurement) -> str:
        return known(getattr(each[1], name), f".{digits}f") or "not read"

    def logit_error(each: Measurement) -> str:
        config, measured = each
        return "reference" if measured.system == config.reference else known(measured.rel_error, ".2g")

    columns: list[doc.Column[Measurement]] = [
        ("batch x tokens", lambda each: config_label(each[0], task)),
        ("system", lambda each: labels[each[1].system]),
        ("p50 ms", lambda each: figures.latency(each[1].p50_ms)),
        ("p90 ms", lambda each: figures.latency(each[1].p90_ms)),
        ("p99 ms", lambda each: figures.latency(each[1].p99_ms)),
        ("launches", lambda each: each[1].launches),
        ("seq/s", lambda each: known(each[1].sequences_per_s, ",.0f")),
        *((f"{count_of(n, 'stream')}, seq/s", partial(rate, n)) for n in bench.settings.streams),
        *((unit, partial(clock, name)) for name, unit in clocks.items()),
        ("logit error", logit_error),
        ("INT8 GEMMs", _int8_gemms),
        ("engine", lambda each: None if each[1].engine_bytes is None else size(each[1].engine_bytes)),
        ("how", _how),
    ]

    def unmeasured(each: Measurement) -> doc.Row | None:
        config, failed = each
        if failed.status == "done":
            return None
        blank = [""] * (len(columns) - 3)
        reason = doc.Cell(f"{failed.status}: {failed.reason}", doc.bad_unless(failed.status != "error"))
        return doc.row(config_label(config, task), labels[failed.system], *blank, reason)

    every = [(config, each) for config in bench.configs for each in config.rows]
    return doc.table_of(every, *columns, instead=unmeasured, texts=(0, 1), look="sortable")


def _int8_gemms(each: Measurement) -> doc.Cell:
    measured = each[1]
    return doc.Cell(str(measured.int8_gemms or ""), doc.bad_unless(not measured.not_int8))


def _how(each: Measurement) -> str:
    detail, kernels = each[1].detail or "", each[1].kernels
    if kernels is None:
        return detail
    fused, wide = kernels.fused_attention, kernels.fp32_gemms
    return f"{detail}; {fused} fused attention kernels, {wide} GEMMs in FP32"
