"""By which backends a run's model can be asked, and what the run showed of each."""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from qdqbench.quantize.engine.sidecar import Sidecar, read_sidecar
from qdqbench.quantize.pipeline.artifacts import GPU, engine_file
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.utils.results import EngineResult, Results

TITLES: dict[BackendName, str] = {
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "tensorrt": "TensorRT",
    "tensorrt_rtx": "TensorRT-RTX",
}
PACKAGES: dict[
    BackendName, tuple[str, ...]
] = {  # distributions that a script imports, beside numpy and tokenizers
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt", "torch"),
    "tensorrt_rtx": ("tensorrt-rtx-cu13", "torch"),
}
BUILD_SCRIPT = "build_tensorrt.sh"


@dataclass(frozen=True)
class Way:
    """One backend."""

    backend: BackendName
    shown: str  # by the run
    ran: bool  # here, as the run's engine
    engine: Path | None = None  # that was built, and what it is for
    sidecar: Sidecar | None = None

    @property
    def title(self) -> str:
        """Its name as it is written."""
        return TITLES[self.backend]

    @property
    def script(self) -> str:
        """What asks it."""
        return f"run_{self.backend}.py"

    @property
    def requirements(self) -> list[str]:
        """Packages of its script, with the versions that the run had; without one where it had none."""
        found = {name: installed(name) for name in PACKAGES[self.backend]}
        if self.sidecar is not None:  # OpenVINO's has a commit behind it, which no index knows
            found[PACKAGES[self.backend][0]] = self.sidecar.version.partition("-")[0]
        return [f"{name}=={version}" if version else name for name, version in found.items()]


def installed(name: str) -> str | None:
    """Version of an installed distribution, without the part that no index has (`+cpu`)."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def find_ways(folder: Path, results: Results, own: BackendName, gpu_graph: Path | None) -> list[Way]:
    """Backends that take a run's graphs; first the one whose engine the run has, where it can be asked here.

    Args:
        folder: of the run.
        own: backend that the run is for.
        gpu_graph: in the form for TensorRT, if the run has one.
    """
    found = {backend: Way(backend, shown, ran=False) for backend, shown in _others(gpu_graph).items()}
    for built, place in ((results.gpu_engine, folder / GPU), (results.engine, folder)):
        if built is not None:
            way = _built(place, built, results)
            found[way.backend] = way
    return sorted(
        found.values(), key=lambda way: (not way.ran, way.backend not in CPU_BACKENDS, way.backend != own)
    )


def _others(gpu_graph: Path | None) -> dict[BackendName, str]:
    """What is true of backends whose engine the run does not have."""
    found: dict[BackendName, str] = {
        "onnxruntime": "the graph as exported, as the run evaluated it (stage onnxruntime): slow. "
        "`ORT_ENABLE_ALL` in `model.json` makes it faster, and its answers may differ a little",
        "openvino": "not tried in the run",
    }
    if gpu_graph is not None:
        found["tensorrt"] = f"not tried in the run; `sh {BUILD_SCRIPT}` builds its engine first"
    return found


def _built(place: Path, built: EngineResult, results: Results) -> Way:
    engine, stage = engine_file(place, built), results.stages.get("engine")
    sidecar = read_sidecar(engine)
    ran = built is results.engine and stage is not None and stage.status == "done"
    targets = ", ".join(built.compute_capability)
    if ran:
        made = (
            "compiled from `model.onnx` as the engine of the run was"
            if built.on_cpu
            else "the engine of the run"
        )
        gpu = f" ({sidecar.gpu})" if sidecar.gpu else ""
        made += f", for compute capability {targets}{gpu}" if targets else ""
        verified = results.verification is not None and results.verification.passed
        checked = "verified" if verified else "NOT verified"
        shown = f"{made}; that was proven, {checked} and evaluated (stage engine)"
    else:
        for_what = f"built for compute capability {targets} with {sidecar.version}"
        shown = f"{for_what}, INT8 read from its layer table; NEVER RUN"
    return Way(_name(built.backend), shown, ran, engine, sidecar)


def _name(backend: str) -> BackendName:
    return next(name for name in TITLES if name == backend)
