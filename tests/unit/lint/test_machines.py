"""Machines by name: what is recommended is what exists, and the right row is found."""

from types import SimpleNamespace

import pytest

from qdqbench.quantize.lint import machines
from qdqbench.quantize.lint.machines import describe_gain, explain_kernels, find_machine, read_machines
from qdqbench.quantize.recipe.schema import family_free_recipes, load_recipe
from qdqbench.quantize.utils.system.cpu import FEATURES, Cpu
from qdqbench.quantize.utils.system.gpu import Gpu

CPU = Cpu("any", 2, ("avx2", "avx512_vnni", "avx512_bf16"))


@pytest.mark.parametrize(
    ("capability", "names", "backend", "recipe"),
    [
        ("7.5", "T4", "tensorrt", "int8-residual-fused"),
        ("8.0", "A100", "tensorrt", "int8-residual-fused"),
        ("8.9", "L4", "tensorrt", "int8-residual-fused"),
        ("9.0", "H200", "cuda", "int8-attention"),
        ("10.3", "B300", "tensorrt", "fp16"),
        ("12.0", "RTX 50", "tensorrt", "int8-residual-fused"),
    ],
)
def test_a_gpu_is_found_by_its_compute_capability(capability, names, backend, recipe):
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
def test_a_cpu_is_found_by_what_it_can(features, names):
    row = find_machine(None, Cpu("any", 2, features))
    assert row is not None
    assert names in row.names


def test_an_unknown_gpu_has_no_row():
    gpu = Gpu("Rubin", "99.0", None)
    assert find_machine(gpu, CPU) is None
    assert describe_gain(gpu, CPU) == "what INT8 can bring on Rubin: not known"


@pytest.mark.parametrize(("gpu", "gain"), [("T4", 1.92), ("A100", 1.92), ("L4", 1.83), ("RTX 4090", 3.23)])
def test_an_estimate_is_of_the_roofline_and_marked_as_that(gpu, gain):
    row, peak = next((row, peak) for row in read_machines() for peak in row.peaks if peak.gpu == gpu)
    assert peak.gain == pytest.approx(gain, abs=0.01)  # by hand: 26.2 and 50.4 ms for a T4
    assert not row.ran
    said = describe_gain(Gpu("mine", row.match[0], None), CPU)
    assert "; roofline estimate " in said
    assert f"{gain:.1f}x on {gpu}" in said


def test_what_the_table_names_exists():
    for row in read_machines():
        assert row.start in family_free_recipes()
        assert all(each in FEATURES or "." in each for each in row.match)


@pytest.mark.parametrize(
    ("here", "family", "hidden", "why"),  # here: compute capability, and what TensorRT-RTX lacks
    [
        (("9.0", None), "bert", 768, "faster than TensorRT-RTX on H100, H200 at every shape we measured"),
        (("8.0", "no TensorRT"), "bert", 768, "as there is no other builder here: no TensorRT"),
        (("8.0", None), "bert", 768, None),  # both are there, and nothing is known
        (("9.0", None), "mpnet", 768, None),  # not timed
        (("9.0", "no TensorRT"), "mpnet", 768, "as there is no other builder here: no TensorRT"),
        (("9.0", None), "bert", 312, "faster than TensorRT-RTX on H100, H200 at every shape we measured"),
        (("9.0", None), "bert", 310, ""),  # no multiple of 4
        (("9.0", None), "bert", 12 * 132, ""),  # heads of over 128
        (("10.3", "no TensorRT"), "bert", 768, ""),
        (("7.0", "no TensorRT"), "bert", 768, ""),
    ],
)
def test_auto_takes_kernels_where_they_are_known_to_be_fastest(here, family, hidden, why, monkeypatch):
    monkeypatch.setattr(machines, "find_gpu", lambda: Gpu("any", here[0], None))
    missing = {"cuda": None, "tensorrt_rtx": here[1]}
    monkeypatch.setattr(machines, "find_missing_builder", lambda name: missing[name])
    monkeypatch.setattr(machines, "gpu_backend", lambda: "tensorrt_rtx")
    monkeypatch.setattr(machines, "choose_backend", lambda name: SimpleNamespace(version="1.6.1"))
    config = SimpleNamespace(hidden_size=hidden, num_attention_heads=12)
    said = explain_kernels(load_recipe("bert-int8-residual-fused"), family, config)
    assert (said is None) is (why is None)
    assert (said or "").endswith(why or "")
    assert (said or "").startswith("auto takes cuda") is bool(why)
