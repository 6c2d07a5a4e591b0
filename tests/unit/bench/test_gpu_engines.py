"""An engine that is there is taken where it still fits, and built where it does not."""

from types import SimpleNamespace

import pytest

from qdqbench.eval.bench import prebuild
from qdqbench.eval.bench.prebuild import EngineSpec, build_engine
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.utils.errors import UserError

from ...support.records import engine_result


@pytest.fixture
def machine(monkeypatch):
    """Builds, and whether an engine fits this machine."""
    given = SimpleNamespace(builds=[], fits=False)

    def build(onnx, engine, **options):
        given.builds.append(options)
        engine.write_bytes(b"engine")
        return engine_result(1, file=engine.name)

    def check(engine, onnx):
        if not given.fits:
            raise UserError("it was built from another model.onnx")

    monkeypatch.setattr(prebuild, "build", build)
    monkeypatch.setattr(prebuild, "check_sidecar", check)
    return given


def test_an_engine_is_reused_only_where_it_fits(machine, tmp_path):
    spec = EngineSpec(
        onnx=tmp_path / "model.onnx", engine=tmp_path / "a.engine", backend="auto",
        profile=Profile((1, 8), (2, 8), (4, 8)), gemms=["/a"], attention=0, compute="fp32", shapes=[(2, 8)],
    )  # fmt: skip
    first = build_engine(spec)
    assert machine.builds[0]["profiles"] == [spec.profile]
    assert build_engine(spec) == first
    assert len(machine.builds) == 2  # it did not fit
    machine.fits = True
    assert build_engine(spec) == first
    assert len(machine.builds) == 2
    spec.proof.unlink()
    build_engine(spec)
    assert len(machine.builds) == 3
