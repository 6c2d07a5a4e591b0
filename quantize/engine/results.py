"""Record of a built engine: its INT8 layers, by its own layer table."""

from collections.abc import Collection

from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.schema import Strict, Tabular, field


class LayerRow(Strict):
    """One kernel of the engine."""

    name: str = field("Name of the kernel.")
    kind: str = field("LayerType of the builder: `gemm`, `kgen`, `runtime_fusion`, ...")
    onnx: list[str] = field(
        "ONNX nodes that it covers; a node whose work is split is listed by several kernels."
    )
    inputs: list[str] = field("Datatypes of the non-constant inputs.")
    constants: list[str] = field("Datatypes of the constants.")
    outputs: list[str] = field("Datatypes of the outputs.")
    kernel: str | None = field(
        "Implementation, as CPU runtimes report it, such as `brgemm_avx512_i8`; else null.", default=None
    )
    residual: str | None = field(
        "Datatype of the residual that a kernel of backend `cuda` adds, or that is in the sum it normalizes.",
        default=None,
    )


class EngineResult(Tabular):
    """The built engine and its INT8 layers (counts are ONNX MatMul/Gemm nodes, not kernels)."""

    backend: str = field("Runtime: `tensorrt`, `tensorrt_rtx`, `cuda`, `openvino` or `onnxruntime`.")
    version: str = field("Version of the builder.")
    compute_capability: list[str] = field("GPUs that the engine is for, such as `8.9`; empty for a CPU.")
    ahead_of_time: bool = field("True if it was built without running on a GPU.")
    file: str = field("Path of the engine in the run directory.")
    bytes: int = field("Size of the engine in bytes.")
    int8_gemms: int = field("MatMul and Gemm nodes that run in INT8, by the engine's own layer table.")
    expected_int8_gemms: int = field("MatMul and Gemm nodes that the recipe puts in INT8.")
    not_int8: list[str] = field(
        "ONNX nodes that the recipe puts in INT8 and the engine runs in another precision."
    )
    attention_fused: int = field("Attention layers that one fused kernel computes.")
    attention_int8: int = field("Fused attention layers with INT8 q, k and v.")
    expected_attention_int8: int = field(
        "Attention layers that the recipe puts in INT8, one fused kernel each."
    )
    int8_residuals: int = field("LayerNorms whose kernel reads the residual as INT8.")
    expected_int8_residuals: int = field("LayerNorms whose residual the recipe puts in INT8.")
    not_int8_residuals: list[str] = field(
        "LayerNorms, by ONNX name, whose residual should be INT8 and is not."
    )
    profiles: int = field("Optimization profiles, each with its own kernels in `layers`.")
    kernels: int = field("Kernels of the profile with the most, without signals and waits.")
    layers: list[LayerRow] = field("Layer table, in the order of execution.")

    def count_linears(self, asked: Collection[str], others: Collection[str]) -> tuple[int, int]:
        """Return how many linear layers run in INT8 as asked, and how many the model has."""
        lost = {module_of(node) for node in self.not_int8}
        return sum(name not in lost for name in asked), len(asked) + len(others)

    @property
    def on_cpu(self) -> bool:
        return self.backend in CPU_BACKENDS

    def rows(self) -> list[LayerRow]:
        return self.layers
