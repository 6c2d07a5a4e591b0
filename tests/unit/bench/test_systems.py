"""Who takes part on a CPU: what was asked for, what is installed, and why the rest cannot."""

import re

import pytest

from qdqbench.eval.bench import systems as table
from qdqbench.eval.bench.systems import TABLE, describe_systems, own_backend, why_absent
from qdqbench.quantize.engine import backend as engine_backend
from qdqbench.quantize.engine.cuda.compile import get_version
from qdqbench.quantize.utils.errors import MissingDevice
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.system.cpu import Cpu

from ...support.fake_bench import PLAN, fake_target
from ...support.tiny_bert import recipe_with

ALL = {system.name: system for system in TABLE if system.device == "cpu"}
OPTIONS = PLAN.model_copy(update={"device": "cpu"})


def listed(plan, recipe="bert-int8-linears", **changes):
    systems = describe_systems(fake_target(recipe), plan.model_copy(update=changes), "tensorrt_rtx 1.4")
    return {system.name: system for system in systems}


def test_who_takes_part_on_a_cpu():
    ours = recipe_with(engine={"backend": "onnxruntime"})
    first, *others = listed(OPTIONS, ours).values()
    assert (first.name, first.label, others[0].name) == ("int8", "INT8 ONNX Runtime", "int8-openvino")
    assert {about.name for about in others} == set(ALL) - {"int8-onnxruntime"}
    engines = ["int8", "int8-openvino", "bf16-openvino", "fp32-openvino", "fp32-onnxruntime"]
    assert [*listed(OPTIONS, ours, baselines=False)] == engines
    assert [*listed(OPTIONS, ours, baselines=False, fp32=False)] == engines[:3]
    assert not {"int8", *engines[:2], "int8-onnxruntime"} & {*listed(OPTIONS, "bert-fp16")}


def test_who_takes_part_on_a_gpu():
    both = PLAN.model_copy(update={"engine_shapes": "both"})
    engines = ["int8", "int8-exact", "int8-cuda", "fp16", "fp16-exact", "fp32"]
    torch = ["torch-fp32", "torch-fp16-eager", "torch-fp16"]
    torch += ["compile-fp16-eager", "compile-fp16", "autotune-fp16", "unpadded-fp16", "unpadded-fp8"]
    assert [*listed(both)] == engines + torch
    assert [*listed(both, baselines=False, fp32=False)] == engines[:5]
    recipes = ["int8", "int8-cuda", "fp16", "fp32"]
    assert [*listed(both, engine_shapes="recipe", baselines=False)] == recipes
    assert [*listed(both, "bert-fp16")][:3] == ["fp16", "fp16-exact", "fp32"]
    assert "unpadded-fp16" not in listed(both, exclude=("unpadded-fp16",))
    exact = listed(PLAN)
    assert exact["int8"].label == "INT8 engine, exact shape"
    assert len({about.label for about in exact.values()}) == len(exact)
    backends = {name: about.backend for name, about in exact.items() if name.startswith("int8")}
    assert backends == {"int8": "tensorrt_rtx 1.4", "int8-cuda": f"cuda {get_version()}"}
    target = fake_target()
    target.extra["mine"] = target  # another recipe's engine takes the same shapes as the others'
    for plan, label in ((PLAN, "INT8 engine, mine, exact shape"), (both, "INT8 engine, mine")):
        assert describe_systems(target, plan, "")[-1].label == label


@pytest.mark.parametrize(
    ("device", "changes", "reads"),
    [
        ("gpu", {}, True),
        ("gpu", {"fp32": False, "engine_shapes": "exact"}, True),
        ("gpu", {"fp32": False, "engine_shapes": "exact", "exclude": ("fp16",)}, False),
        ("gpu", {"fp32": False, "engine_shapes": "both", "exclude": ("fp16",)}, True),
        ("cpu", {}, True),
    ],
)
def test_graphs_without_int8_are_read_by_who_takes_part(device, changes, reads):
    assert table.reads_floats(PLAN.model_copy(update={"device": device, **changes})) is reads


def test_a_backend_that_is_not_installed_is_a_missing_device_with_the_command(monkeypatch):
    monkeypatch.setattr(engine_backend, "_import", lambda name: None)
    with pytest.raises(
        MissingDevice, match=re.escape(f"openvino is not installed; {install_command('openvino')}")
    ):
        own_backend("openvino")


def test_a_recipe_for_a_gpu_takes_the_first_runtime_of_this_machine(monkeypatch):
    monkeypatch.setattr(engine_backend, "find_spec", lambda name: name == "onnxruntime")
    assert own_backend("tensorrt_rtx") == own_backend("auto") == "onnxruntime"


def test_why_one_cannot_take_part(monkeypatch):
    cpu = Cpu("old", 2, ("avx2",))
    monkeypatch.setattr(table, "find_cpu", lambda: cpu)
    monkeypatch.setattr(table.shutil, "which", lambda name: None)
    installed = {"openvino": "2026.4", "torch": "2.13"}
    monkeypatch.setattr(table, "_version", lambda library: installed.get(library, ""))
    assert why_absent(ALL["fp32-openvino"]) is None
    assert why_absent(ALL["nncf-openvino"]) == "nncf is not installed: pip install nncf"
    assert why_absent(ALL["bf16-openvino"]) == "this CPU multiplies no BF16"
    assert why_absent(ALL["compile-fp32"]) == "torch.compile needs a C++ compiler, such as g++"
    installed.clear()
    assert install_command("openvino") in str(why_absent(ALL["int8-openvino"]))
