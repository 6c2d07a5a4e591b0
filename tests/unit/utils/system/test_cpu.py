import pytest

from qdqbench.quantize.utils.system import cpu
from qdqbench.quantize.utils.system.cpu import Cpu, cpu_hazards, find_cpu

X86 = "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 avx512_vnni avx512_bf16\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\n"


@pytest.mark.parametrize(
    ("said", "features", "name"),
    [
        (X86, ("avx2", "avx512_vnni", "avx512_bf16"), "A CPU"),
        (ARM, ("asimddp", "i8mm", "bf16"), None),
        ("", (), None),
    ],
)
def test_a_cpu_by_what_the_system_says(said, features, name, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(said)
    monkeypatch.setattr(cpu, "_CPUINFO", path)
    find_cpu.cache_clear()
    try:
        found = find_cpu()
    finally:
        find_cpu.cache_clear()
    assert found.features == features
    assert found.cores >= 1
    assert name in (None, found.name)
    assert found.bf16 == bool({"avx512_bf16", "bf16"} & {*features})
    assert cpu_hazards(found) == []


def test_a_cpu_without_int8_products_draws_a_warning():
    (said,) = cpu_hazards(Cpu("an old CPU", 4, ("avx2", "avx512f")))
    assert "an old CPU has no INT8 dot product" in said
    assert "saturate" in said
    assert str(Cpu("one", 1, ())) == "one (1 core; instruction sets unknown)"
