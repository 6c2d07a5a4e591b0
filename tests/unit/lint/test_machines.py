"""Machines by name: what is recommended is what exists, and the right row is found."""

import pytest

from qdqbench.quantize.lint.machines import describe_gain, find_machine, read_machines
from qdqbench.quantize.recipe.schema import family_free_recipes
from qdqbench.quantize.utils.system.cpu import FEATURES, Cpu
from qdqbench.quantize.utils.system.gpu import Gpu

CPU = Cpu("any", 2, ("avx2", "avx512_vnni", "avx512_bf16"))


@pytest.mark.parametrize(
    ("capability", "names", "backend", "recipe"),
    [
        ("7.5", "T4", "tensorrt", "int8-residual-fused"),
        ("8.0", "A100", "tensorrt", "int8-residual-fused"),
        ("8.9", "L4", "tensorrt", "int8-residual-fused"),
        ("9.0", "H200", "cuda", "int8-residual-fused"),
        ("10.3", "B300", "tensorrt", "fp16"),
        ("12.0", "RTX 50", "tensorrt", "int8-residual-fused"),
    ],
)
def test_a_gpu_is_found_by_its_compute_capability(
    capability: str, names: str, backend: str, recipe: str
) -> None:
    row = find_machine(Gpu("any", capability, None), CPU)
    assert row is not None
    assert names in row.names
    assert (row.backend, row.start) == (backend, recipe)


@pytest.mark.parametrize(
    ("features", "names"),
    [
        (("avx2", "avx512_vnni", "amx_int8"), "AMX"),
        (("avx2", "avx512_vnni"), "EPYC"),
        (("avx_vnni",), "EPYC"),
        (("asimddp",), "Graviton"),
        (("avx2",), "older"),
        ((), "older"),
    ],
)
def test_a_cpu_is_found_by_what_it_can(features: tuple[str, ...], names: str) -> None:
    row = find_machine(None, Cpu("any", 2, features))
    assert row is not None
    assert names in row.names


def test_an_unknown_gpu_has_no_row() -> None:
    gpu = Gpu("Rubin", "99.0", None)
    assert find_machine(gpu, CPU) is None
    assert describe_gain(gpu, CPU) == "what INT8 can bring on Rubin: not known"


def test_what_the_table_names_exists() -> None:
    for row in read_machines():
        assert row.start in family_free_recipes()
        assert all(each in FEATURES or "." in each for each in row.match)
