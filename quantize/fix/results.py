"""What `fix` did, and how it is proven."""

from qdqbench.quantize.core.strict import Strict


class EngineRow(Strict):
    """What an engine of a file runs in INT8, or why there is none."""

    engine: str  # backend, version, compute capability
    refused: str | None = None
    gemms: int = 0  # linears that its layer table names
    int8_gemms: int = 0
    attentions: int = 0
    attention_fused: int = 0
    attention_int8: int = 0
    kernels: int = 0


class Outputs(Strict):
    """Outputs of ONNX Runtime; errors are relative, ||a - b|| / ||b|| over all outputs."""

    inputs: str  # where they come from
    n: int  # samples
    before_error: (
        float | None
    )  # of the file to its own values without Q/DQ; None: ONNX Runtime does not run it
    after_error: float  # of what was written, to the same
    difference: float | None  # of what was written to the file
    limit: float  # of `after_error`
    largest: float | None  # absolute difference of one output
    disagreements: int | None  # samples with another largest output; None: outputs are no scores of classes

    @property
    def holds(self) -> bool:
        """Within the limit; what is not a number is not."""
        return self.after_error <= self.limit


class FixReport(Strict):
    """Of one file."""

    file: str
    out: str
    done: list[str]  # sentences
    left: list[str]  # what could not be mended, and what to do
    findings_before: dict[str, int]  # code of `check` -> how many
    findings_after: dict[str, int]
    int8_before: int  # matrix products that TensorRT would run in INT8, by the graph: 0 in a refused file
    int8_after: int
    gemms: int
    outputs: Outputs
    engine_before: EngineRow | None = None  # None: not built
    engine_after: EngineRow | None = None

    @property
    def failures(self) -> list[str]:
        """What does not hold."""
        found = []
        if not self.outputs.holds:
            out = self.outputs
            found.append(f"outputs are {out.after_error:.3g} off, and the limit is {out.limit:.3g}")
        if self.engine_after and self.engine_after.refused:
            found.append("the builder refuses what was written")
        return found + self.left
