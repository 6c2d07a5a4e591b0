"""Known faults of TensorRT versions; those that show in the graph itself are found by `qdqbench check`."""

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Hazard:
    backend: str  # or another package, by its name
    what: str
    since: str | None = None  # first version that has it
    fixed: str | None = None  # first version that does not
    compute_capability: str | None = None  # None: every GPU


HAZARDS = (
    Hazard(
        backend="tensorrt",
        since="10.0.0",
        fixed="10.0.1.6",
        what="fused attention (_gemm_mha_v2) can differ from the reference in FP16; 10.0.1.6 has the fix",
    ),
    Hazard(
        backend="tensorrt_rtx",
        compute_capability="9.0",
        fixed="1.7",
        what="compute capability 9.0 (Hopper) is not officially supported, so speed is not what TensorRT "
        "itself reaches there",
    ),
    Hazard(
        backend="tensorrt_rtx",
        compute_capability="9.0",
        since="1.7",
        what="compute capability 9.0 (Hopper) is not supported and this version refuses it; 1.4 to 1.6 run "
        "there unofficially",
    ),
    *(
        Hazard(
            backend="tensorrt_rtx",
            compute_capability=capability,
            since="1.7",
            what=f"compute capability {capability} is not supported and this version refuses it",
        )
        for capability in ("10.0", "10.3")
    ),
    Hazard(
        backend="cuda",
        compute_capability="10.0",
        what="the kernels multiply by mma.sync there, not by tcgen05: slower than the GPU could be",
    ),
    Hazard(
        backend="nvidia-modelopt",
        since="0.47",
        what="MSE over its histogram calibrator is useless (qdqbench has its own). Its INT8 default puts "
        "quantizers on LayerNorm, and its gradient passes where a value was clipped; seen with 0.47",
    ),
    Hazard(
        backend="torch",
        since="2.11",
        compute_capability="9.0",
        what="the gradient of cuDNN's attention in BF16 is NaN where a mask leaves a row nothing "
        "(pytorch/pytorch#196678); seen with 2.11, and ModernBERT trains without it",
    ),
)

RTX_WITHOUT_GPU = "1.6"  # first TensorRT-RTX that builds where no GPU is


def find_hazards(backend: str, version: str, compute_capability: str | None) -> list[str]:
    here = _parsed(version)
    return [
        f"{backend} {version}: {hazard.what}"
        for hazard in HAZARDS
        if hazard.backend == backend
        and (hazard.since is None or here >= _parsed(hazard.since))
        and (hazard.fixed is None or here < _parsed(hazard.fixed))
        and hazard.compute_capability in (None, compute_capability)
    ]


def is_older(version: str, other: str) -> bool:
    return _parsed(version) < _parsed(other)


def version_text(number: int) -> str:
    major, rest = divmod(number, 10_000 if number >= 100_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _parsed(version: str) -> Version:
    """Parse a version; what is none comes before all."""
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0")
