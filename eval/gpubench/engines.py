"""Engines of a bench on a GPU: one for each profile that a shape takes, reused where it still fits.

Kernels are chosen for each profile by itself, so an engine of one profile runs what an engine of several runs
in that profile; single ones are built side by side.
"""

from contextlib import ExitStack, suppress
from pathlib import Path

from qdqbench.eval.bench.cell import CellShape, profiles_of
from qdqbench.eval.bench.target import Target
from qdqbench.eval.gpubench.contestants import Kind
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.limits import BackendChoice
from qdqbench.quantize.core.results import EngineResult
from qdqbench.quantize.core.strict import Strict, read
from qdqbench.quantize.cpu.compiled import Compute
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.profiles import Profile, choose_profile
from qdqbench.quantize.engine.sidecar import check_sidecar, sidecar_path
from qdqbench.quantize.rundir import artifacts

Pair = tuple[int, int]  # batch, length


class EngineSpec(Strict):
    """An engine to build."""

    onnx: Path
    engine: Path
    backend: BackendChoice
    profile: Profile
    gemms: list[str]  # ONNX nodes that must run in INT8
    attention: int
    compute: Compute
    shapes: list[Pair]  # that it will run

    @property
    def cache(self) -> Path:
        """Kernels compiled just in time."""
        return self.engine.with_suffix(".cache")

    @property
    def proof(self) -> Path:
        """What the build found."""
        return self.engine.with_suffix(".proof.json")


def owner_of(target: Target, kind: Kind) -> Target:
    """The target whose recipe an engine is of."""
    return target.also.get(kind.recipe, target)


def specs_of(target: Target, kind: Kind, shape: CellShape) -> dict[Pair, EngineSpec]:
    """The engine that each (batch, length) of a cell runs in.

    Raises:
        CheckFailed: no profile of the recipe takes one.
    """
    owner, int8 = owner_of(target, kind), kind.precision == "int8"
    session, found = owner.session, dict[Pair, EngineSpec]()
    profiles = profiles_of(owner, kind.profile, shape)
    gemms, attention = (owner.gemms, len(session.plan.attention)) if int8 else ([], 0)
    for pair in shape.bound:
        profile = profiles[choose_profile(profiles, *pair)]
        sizes = "-".join("x".join(map(str, size)) for size in (profile.min, profile.opt, profile.max))
        found[pair] = EngineSpec(
            onnx=owner.twins[kind.precision],
            engine=session.folder / "bench" / f"{kind.precision}.{sizes}.engine",
            backend=session.recipe.engine.backend,
            profile=profile,
            gemms=gemms,
            attention=attention,
            compute=artifacts.cpu_compute(session.recipe),
            shapes=[pair],
        )
    return found


def marker(folder: Path, mode: str, pair: Pair) -> Path:
    """Says that Inductor's cache has a mode of torch.compile for a shape."""
    return folder / f"{mode}.{pair[0]}x{pair[1]}.compiled"


def make(spec: EngineSpec) -> EngineResult:
    """Build an engine, or take one that is there from the same graph, version and machine.

    Raises:
        UserError, CheckFailed, MissingDevice: it cannot be built.
    """
    with suppress(UserError):
        check_sidecar(spec.engine, spec.onnx)
        return read(spec.proof, EngineResult, "proof of an engine", "build it again")
    result = build(
        spec.onnx,
        spec.engine,
        backend=spec.backend,
        profiles=[spec.profile],
        expected_gemms=spec.gemms,
        expected_attention=spec.attention,
        layers_path=spec.engine.with_suffix(".layers.json"),
        compute=spec.compute,
    )
    files.write_json(spec.proof, result.model_dump(mode="json"))
    return result


def forget(spec: EngineSpec, stack: ExitStack) -> None:
    """Delete an engine's files at the end; its layer table stays."""
    for path in (spec.proof, spec.cache, sidecar_path(spec.engine), spec.engine):
        stack.callback(path.unlink, missing_ok=True)
