"""The one schema for a ratio of two latencies, as every results file has it."""

from typing import Literal

from qdqbench.quantize.utils.schema import Strict, field

SpeedVerdict = Literal["faster", "slower", "inconclusive"]


class Speedup(Strict):
    """Speed-up of a system over its baseline, timed interleaved in the same rounds."""

    system: str = field("Name of the system.")
    baseline: str = field("Name of the baseline.")
    config: str = field("Config that both ran, such as `b32 s128`.")
    value: float = field("`baseline_ms` / `system_ms`; below 1: slower.")
    ci95_low: float | None = field(
        "Lower end of the 95% confidence interval, by bootstrap over rounds; null with fewer than three."
    )
    ci95_high: float | None = field(
        "Upper end of the 95% confidence interval; null with fewer than three rounds."
    )
    system_ms: float = field("Latency of the system in ms: median over rounds of the rounds' medians.")
    baseline_ms: float = field("Latency of the baseline in ms, likewise.")
    quick: bool = field("True in results of a run whose bench is the quick one.", default=False)

    @property
    def interval(self) -> str:
        """The 95% interval in brackets; empty with fewer than three rounds."""
        if self.ci95_low is None or self.ci95_high is None:
            return ""
        return f"[{self.ci95_low:.2f}, {self.ci95_high:.2f}]"

    @property
    def verdict(self) -> SpeedVerdict:
        if self.ci95_low is not None and self.ci95_high is not None and self.ci95_low <= 1 <= self.ci95_high:
            return "inconclusive"
        return "slower" if self.value < 1 else "faster"
