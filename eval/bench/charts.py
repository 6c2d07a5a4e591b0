"""Charts of a bench as inline SVG, in the style of `plots`: latency, speed-up and throughput by batch."""

from collections.abc import Callable, Iterable
from typing import Any

from qdqbench.eval.bench.results import Bench, BenchConfig, headline_of, rate_of, row_of, speedup_of
from qdqbench.eval.report import svg

SYSTEM_STYLES = {  # color is never the only difference
    "int8": (svg.BLUE, "o"),
    "fp16": (svg.ORANGE, "s"),
    "fp32": (svg.MUTED, "X"),
    "torch-fp32": (svg.SKY, "v"),
    "torch-fp16": (svg.GREEN, "^"),
    "compile-fp16": (svg.PURPLE, "D"),
    "int8-exact": (svg.BLUE, "P"),
    "fp16-exact": (svg.ORANGE, "P"),
    "torch-fp16-eager": (svg.GREEN, "1"),
    "compile-fp16-eager": (svg.PURPLE, "2"),
    "autotune-fp16": (svg.PURPLE, "*"),
    "unpadded-fp16": (svg.VERMILLION, "p"),
    "int8-openvino": (svg.BLUE, "P"),
    "int8-onnxruntime": (svg.BLUE, "*"),
    "bf16-openvino": (svg.ORANGE, "s"),
    "fp32-openvino": (svg.ORANGE, "X"),
    "fp32-onnxruntime": (svg.MUTED, "X"),
    "dynamic-onnxruntime": (svg.MUTED, "p"),
    "nncf-openvino": (svg.VERMILLION, "h"),
    "torch-bf16": (svg.GREEN, "^"),
    "compile-fp32": (svg.PURPLE, "d"),
    "compile-bf16": (svg.PURPLE, "D"),
}
OTHER_STYLE = (svg.VERMILLION, "8")  # INT8 by other recipes
STREAM_DASHES = ((0, ()), (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))  # by number of streams


def latency_svg(bench: Bench) -> str:
    """Median latency by batch; one panel per length; may be empty."""

    def draw(axes: Any, configs: list[BenchConfig]) -> None:
        for about in bench.systems:
            rows = [row_of(config, about.name) for config in configs]
            _line(axes, about.name, about.label, (row.median_ms if row else None for row in rows))
        svg.log_scale(axes)
        axes.set_ylabel("ms, log scale")

    return _panels(bench, "latency", "median latency", draw)


def speedup_svg(bench: Bench) -> str:
    """Speed-up of INT8 over each system by batch, 95% intervals; a panel per length; may be empty.

    The headline of the report is drawn over them: over the fastest system without INT8.
    """
    fastest = "the fastest without INT8"

    def draw(axes: Any, configs: list[BenchConfig]) -> None:
        axes.axhline(1, **svg.LIMIT_LINE, label="1 = as fast")
        for about in bench.systems:
            found = [speedup_of(config, "int8", about.name) for config in configs]
            _line(axes, about.name, about.label, (ratio.value if ratio else None for ratio in found))
            for place, ratio in enumerate(found):
                if ratio is not None and ratio.ci95_low is not None and ratio.ci95_high is not None:
                    color = SYSTEM_STYLES.get(about.name, OTHER_STYLE)[0]
                    axes.vlines(place, ratio.ci95_low, ratio.ci95_high, color=color, linewidth=3, alpha=0.4)
        best = [headline_of(bench.systems, config) for config in configs]
        heights = [(place, found.value) for place, found in enumerate(best) if found is not None]
        if heights:
            look = {"color": svg.INK, "marker": "_", "markersize": 16, "markeredgewidth": 2, "linestyle": ""}
            axes.plot(*zip(*heights, strict=True), **look, label=fastest)
        svg.log_scale(axes)
        axes.set_ylabel("times as fast, log scale")

    if not any(s.system == "int8" for config in bench.configs for s in config.speedups):
        return ""
    return _panels(bench, "speedup", "speed-up of INT8 over each", draw)


def throughput_svg(bench: Bench) -> str:
    """Sequences per second by batch and number of streams; one panel per length; may be empty."""

    def draw(axes: Any, configs: list[BenchConfig]) -> None:
        for about in bench.systems:
            for number, streams in enumerate(bench.settings.streams):
                rates = (rate_of(config, about.name, streams) for config in configs)
                label = "_" if number else about.label  # matplotlib leaves it out of the legend
                _line(axes, about.name, label, rates, STREAM_DASHES[number % len(STREAM_DASHES)])
        for number, streams in enumerate(bench.settings.streams):
            text = f"{streams} stream{'s' if streams > 1 else ''}"
            axes.plot(
                [], [], color=svg.MUTED, linestyle=STREAM_DASHES[number % len(STREAM_DASHES)], label=text
            )
        svg.log_scale(axes, number=",.0f")
        axes.set_ylabel("sequences/s, log scale")

    if not any(row.throughput for config in bench.configs for row in config.rows):
        return ""
    return _panels(bench, "throughput", "sequences per second", draw)


def _panels(bench: Bench, name: str, title: str, draw: Callable[[Any, list[BenchConfig]], None]) -> str:
    fixed = [config for config in bench.configs if config.kind == "fixed"]
    lengths = list(dict.fromkeys(config.length for config in fixed))
    if not any(row.status == "done" for config in fixed for row in config.rows):
        return ""
    figure = svg.figure_of(1.2 + 2.2 * len(lengths))
    for index, length in enumerate(lengths):
        axes = figure.add_subplot(len(lengths), 1, index + 1)
        configs = sorted(
            (config for config in fixed if config.length == length), key=lambda config: config.batch
        )
        draw(axes, configs)
        axes.set_xticks(range(len(configs)), [str(config.batch) for config in configs])
        axes.set_xlim(-0.4, len(configs) - 0.6)
        axes.set_xlabel("batch")
        svg.dress(axes, f"{title}, {length} tokens")
    svg.legend(figure, 2, 2.4 if name == "throughput" else 1.3)
    random = ", random weights" if bench.target.random_weights else ""
    return svg.svg_of(figure, f"bench-{name}", f"{title}, by batch{random}")


def _line(
    axes: Any, name: str, label: str, values: Iterable[float | None], style: Any = STREAM_DASHES[0]
) -> None:
    points = [(place, value) for place, value in enumerate(values) if value is not None]
    if not points:
        return
    places, heights = zip(*points, strict=True)
    color, marker = SYSTEM_STYLES.get(name, OTHER_STYLE)
    axes.plot(places, heights, color=color, marker=marker, markersize=4.5, linestyle=style, label=label)
