"""Engine files: built without a GPU, what their layer tables prove, and damaged ones."""

import functools
import itertools
import json
import operator
from dataclasses import asdict, replace
from importlib import metadata

import numpy as np
import onnx
import pytest
from safetensors.numpy import load, save

from qdqbench.eval.verification.blocks import stitch
from qdqbench.quantize.engine import backend
from qdqbench.quantize.engine.build import build, list_gemms, require_int8
from qdqbench.quantize.engine.cuda import compile as kernels
from qdqbench.quantize.engine.cuda import file as files
from qdqbench.quantize.engine.cuda import names
from qdqbench.quantize.engine.cuda.file import build_file, list_rows, read_file
from qdqbench.quantize.engine.cuda.interpret import interpret
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.engine.cuda.plan import Attention, Quantize, Tensor
from qdqbench.quantize.engine.layers import is_norm, norm_precision
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.runtime.runners import CompiledEngine
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.utils.errors import MissingDevice, QdqError, UserError
from qdqbench.quantize.utils.system.gpu import Gpu, find_gpu

from ....support.cuda_boundaries import run_outputs
from ....support.cuda_graphs import RECIPES, batch_for
from ....support.interpreted import use_no_nvrtc

PLACES = (  # that an array does not have
    *({"dtype": kind} for kind in ("F64", "BF16", None, [])),
    *({"shape": shape} for shape in ([1], [-1, -1], [True], [1e3], "x", [1 << 70], [1] * 99)),
    *(
        {"data_offsets": place}
        for place in ([0, 1], [-1, 3], [0, 1 << 70], [0], None, ["a", "b"], [None, None])
    ),
)
HOPPER = names.find_target("9.0")
PROFILE = Profile((1, 1), (2, 16), (4, 128))


@pytest.fixture
def without_nvrtc(monkeypatch):
    use_no_nvrtc(monkeypatch)


@pytest.fixture
def engine(graph_of, without_nvrtc, tmp_path):
    path = tmp_path / "model.engine"
    path.write_bytes(build_file(graph_of("bert-int8-residual-fused", 32))[0])
    return path


def test_kernels_of_shipped_recipes_compile_and_are_found(packed, nvrtc):
    lines: dict[str, set[str]] = {}
    expected: set[str] = set()
    for recipe, head_size in itertools.product(RECIPES["bert"], names.ATTENTION_SIZES):
        plan, _ = packed("bert", recipe)
        operations = tuple(
            replace(each, head_size=head_size) if isinstance(each, Attention) else each
            for each in plan.operations
        )
        plan = replace(plan, operations=operations)
        expected |= names.list_kernels(plan, HOPPER)
        for source, made in kernels.list_lines([plan], HOPPER).items():
            lines.setdefault(source, set()).update(made)
    assert {*lines} == {"attention", "gemm", "head", "norm"}
    cubins = [kernels.compile_source(source, sorted(made), HOPPER) for source, made in lines.items()]
    there = [names.find_symbols(cubin) for cubin in cubins]
    assert expected <= set().union(*there)
    assert sum(map(len, there)) == len(set().union(*there)) > 20


@pytest.mark.parametrize("name", ["8.6", "9.0"])
def test_int8_products_are_in_the_machine_code(name, packed, nvrtc):
    plan, _ = packed("bert-int8-attention", 32)
    target = names.find_target(name)
    found = [kernels.find_products(code) for code in kernels.compile_kernels(plan, [target])[name].values()]
    if not any(found):
        pytest.skip("needs nvdisasm: pip install 'qdqbench[hopper]'")
    made = {name: products for each in found for name, products in each.items()}
    assert made.keys() >= names.list_kernels(plan, target)
    for kernel, products in made.items():
        wanted = {"gemm": {"IGMMA" if target.wgmma else "IMMA"}, "attention": {"IMMA"}, "head": {"HMMA"}}
        assert products == wanted.get(kernel.partition("_")[0], set())


def test_a_kernel_that_multiplies_in_fp16_is_no_int8_kernel(graph_of, without_nvrtc, monkeypatch):
    for products in ({"HGMMA"}, {"IGMMA", "HGMMA"}, set()):
        monkeypatch.setattr(files, "find_products", lambda _, found=products: {"gemm_64_64": found})
        with pytest.raises(QdqError, match=r"kernel gemm_64_64 multiplies by .*, and INT8 by IGMMA alone"):
            build_file(graph_of("bert-int8-linears", 32))


@pytest.mark.parametrize("recipe", [name for name in RECIPES["bert"] if not name.endswith(("fp16", "-qat"))])
def test_a_build_proves_what_the_recipe_wants(recipe, path_of, without_nvrtc, tmp_path):
    path = path_of(recipe, 32)
    nodes = onnx.load(path).graph.node
    int8 = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    turned = {node.output[0] for node in nodes if node.op_type == "Transpose" and node.input[0] in int8}
    products = {node.name: node.input for node in nodes if node.op_type == "MatMul"}
    expected = [name for name, read in products.items() if read[0] in int8 | turned or read[1] in turned]
    attention = sum(name.endswith("self/MatMul") for name in expected)
    assert expected
    out, given = tmp_path / "model.engine", {"backend": "cuda", "profiles": [PROFILE]}
    result = build(path, out, **given, expected_gemms=expected, expected_attention=attention)
    require_int8(result)
    assert (result.int8_gemms, result.not_int8) == (len(expected), [])
    assert result.attention_int8 == attention == (2 if "linears" not in recipe and "ffn" not in recipe else 0)
    assert result.int8_residuals == (4 if "residual" in recipe else 0)
    assert (result.compute_capability, result.ahead_of_time) == ([*names.NAMES[not attention :]], True)
    covered = [name for row in result.layers for name in row.onnx]
    assert {*covered} == {node.name for node in nodes} >= {*list_gemms(path)}
    assert {norm_precision(row) for row in filter(is_norm, result.layers)} == {"FP32"}
    sidecar = check_sidecar(out, path)
    assert (sidecar.backend, sidecar.version, sidecar.gpu) == ("cuda", kernels.get_version(), None)
    everything = [*expected, *(name for name in products if name not in expected)]
    if len(everything) > len(expected):
        lost = build(path, out, **given, expected_gemms=everything, expected_attention=2)
        assert lost.not_int8 == sorted({*everything} - {*expected})


def test_a_file_holds_the_plan_and_its_arrays(engine, packed):
    plan, arrays = packed("bert-int8-residual-fused", 32)
    found = read_file(engine)
    assert found.plan == plan
    assert found.arrays.keys() == arrays.keys()
    assert all((found.arrays[name] == array).all() for name, array in arrays.items())
    assert [row.residual for row in list_rows(plan) if row.residual] == ["Int8"] * 8


def parts_of(data):
    """The JSON of an engine file, and what is behind it."""
    size = 8 + int.from_bytes(data[:8], "little")
    return data[8:size].decode(), data[size:]


def test_a_damaged_file_or_one_of_another_version_is_refused(engine, tmp_path):
    data, stored = engine.read_bytes(), load(engine.read_bytes())
    header, rest = parts_of(data)
    told = json.loads(header)["__metadata__"]
    first = next(name for name in stored if name.endswith(".weight"))
    without_code = {name: array for name, array in stored.items() if not name.startswith("code.")}
    plan = json.loads(told["plan"])

    def written(change=None, arrays=stored):
        return save(arrays, told | (change or {}))

    def planned(**change):
        return written({"plan": json.dumps(plan | change)})

    def headed(made):
        return len(made).to_bytes(8, "little") + made + rest

    def placed(**change):
        """The file with another entry of an array, whose bytes stay."""
        entries = json.loads(header)
        return headed(json.dumps(entries | {first: entries[first] | change}).encode())

    entry = json.dumps({first: {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}})
    twice = headed(f"{entry[:-1]}, {header.rstrip()[1:]}".encode())
    assert placed().endswith(data[-100:])
    assert told["qdqbench"] == metadata.version("qdqbench")
    for broken, message in (
        *((data[:size], "is no whole engine") for size in (0, 7, 100, len(data) // 2, len(data) - 1)),
        (data + b"\0", "is no whole engine"),
        (save(stored), "has version None"),
        (written({"version": "0.0.1-abc"}), "has version 0.0.1-abc, and this one is"),
        (written({"plan": "{"}), "is no whole engine"),
        (written({"plan": " " * (4 << 20)}), r"\(a header of \d{7} bytes\)"),
        (written({"plan": "[" * 100_000}), "is no whole engine"),
        (written({"plan": "9" * 5000}), "is no whole engine"),
        *((placed(**change), "is no whole engine") for change in PLACES),
        (planned(more=1), r"\('more' is unknown or missing in Plan\)"),
        (planned(operations=[]), "ends without a head"),
        (planned(operations=plan["operations"][1:]), "the plan reads"),
        (planned(operations=plan["operations"][:1] + plan["operations"]), "has two of embed"),
        (
            planned(operations=[*plan["operations"], plan["operations"][-1] | {"name": "another"}]),
            "has not one embedding and one head",
        ),
        (written({"version": "\x1b[2J"}), r"has version \?\[2J, and"),
        (
            planned(operations=[plan["operations"][0] | {"name": "\x1b]0;x\x07"}, *plan["operations"][1:]]),
            "^[^\x1b\x07]*$",
        ),
        (written(arrays=stored | {"\x1b[2J": stored[first]}), r"no kernel reads \?\[2J"),
        (headed(header.encode("utf-16")), "is no whole engine"),
        (twice, r"\(a key that is there twice\)"),
        (planned(inputs=plan["inputs"][1:]), "the plan needs the inputs attention_mask, input_ids, token"),
        (planned(states=["nowhere"]), "the plan gives nowhere as codes, or never"),
        (written(arrays={name: a for name, a in stored.items() if name != first}), "its kernel reads"),
        (written(arrays=stored | {first: stored[first].astype(np.uint8)}), "its kernel reads"),
        (written(arrays=stored | {"more": stored[first]}), "no kernel reads more"),
        (written(arrays=stored | {"code.8.0.gemm": stored["code.8.0.gemm"][:-9]}), "code for 8.0 lacks the"),
        (
            written(arrays=stored | {"code.8.1.gemm": stored["code.8.0.gemm"]}),
            "is for 12.0, 7.5, 8.0, 8.0.PTX,",
        ),
        (written(arrays=without_code), "is for no GPU; build"),
    ):
        path = tmp_path / "broken.engine"
        path.write_bytes(broken)
        with pytest.raises(QdqError, match=message):
            read_file(path)


def paths_of(value, path=()):
    """Places of all values in a JSON document."""
    nested = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in nested:
        yield (*path, key)
        yield from paths_of(part, (*path, key))


def test_any_change_of_a_plan_is_read_or_refused(engine, tmp_path):
    """Each value of the plan in turn is taken away, or is another: nothing but a sentence may come of it."""
    stored, told = load(engine.read_bytes()), json.loads(parts_of(engine.read_bytes())[0])["__metadata__"]
    plan, path, refused = json.loads(told["plan"]), tmp_path / "changed.engine", 0
    places = [place for place in paths_of(plan) if "nodes" not in place]
    for number, place in enumerate(places):
        changed = json.loads(told["plan"])
        owner = functools.reduce(operator.getitem, place[:-1], changed)
        if number % 7:
            owner[place[-1]] = (None, -1, 2048, "x", [], {})[number % 7 - 1]
        else:
            del owner[place[-1]]
        path.write_bytes(save(stored, told | {"plan": json.dumps(changed)}))
        try:
            read_file(path)
        except QdqError as error:
            refused += "\n" not in str(error)
    assert refused > 0.7 * len(places)


def test_sizes_that_no_kernel_takes_are_refused(packed, tmp_path, monkeypatch):
    monkeypatch.setattr("qdqbench.quantize.engine.cuda.pack.widen_heads", lambda *given: given)
    plan, arrays = packed("bert", "bert-int8-attention")
    path, told = tmp_path / "model.engine", {"version": kernels.get_version()}
    path.write_bytes(save(arrays, told | {"plan": json.dumps(asdict(plan))}))

    def refused(message, read=None, **changes):
        with pytest.raises(UserError, match=message):
            read_file(read) if read else kernels.compile_kernels(replace(plan, **changes), [HOPPER])

    padded = "heads of INT8 attention are padded to 32, 64 or 128 channels, not 16; take tensorrt_rtx"
    refused(padded)
    refused(padded, path)
    operations = (
        replace(each, head_size=4, heads=8, probability_multiplier=None)
        if isinstance(each, Attention)
        else each
        for each in plan.operations
    )
    refused("FP16 attention have a multiple of 8 channels up to 256, not 4;", operations=tuple(operations))
    attention, linear = replace(plan.attentions[0], head_size=32, heads=1), plan.linears[0]
    for changed, message in (
        (replace(attention, key=replace(attention.key, column=33)), "begin at multiples of 16"),
        (replace(linear, activation="gelu", residual=linear.input), "an activation or a residual, not both"),
        (Quantize(name="q", input=linear.input, codes=("odd",)), "a multiple of 4 channels, not 66"),
    ):
        tensors = plan.tensors | {"odd": Tensor(kind="int8", width=66)}
        refused(message, operations=(changed,), tensors=tensors)
    for kind, width, message in (
        ("linear", 40, "next to FP16 attention of 16, not 40"),
        ("norm", 8192, "up to 4096 channels"),
    ):
        operation = next(each for each in plan.operations if each.op == kind)
        touched = (operation.writes[0], *operation.reads)
        tensors = {name: replace(plan.tensors[name], width=width) for name in touched}
        refused(message, operations=(operation,), tensors=plan.tensors | tensors)


def test_a_build_without_nvrtc_or_for_another_gpu_is_refused(path_of, tmp_path, monkeypatch):
    given = {"profiles": [PROFILE], "expected_gemms": [], "expected_attention": 0, "backend": "cuda"}
    path = path_of("bert-int8-linears", 32)
    for wanted, message in (
        (["8.0", "7.0"], r"runs on compute capability 7\.5 and newer, not on 7\.0"),
        ("ampere", r"builds for compute capability 7\.5, .*PTX, not 'ampere'"),
        ("10.3", r"does not run on compute capability 10\.3: it has few INT8 units"),
        (
            "7.5",
            r"no kernel for .*FP16 attention, on compute capability 7\.5; take a recipe with INT8 attention",
        ),
    ):
        with pytest.raises(UserError, match=message):
            build(path, tmp_path / "e", compute_capability=wanted, **given)

    with pytest.raises(UserError, match=r"65536 tokens at once, and engine\.shapes .*129.* has more"):
        build(path, tmp_path / "e", **given | {"profiles": [Profile((1, 1), (8, 64), (129, 512))]})

    def missing(*_):
        raise MissingDevice("no NVRTC")

    for module in (kernels, backend):
        monkeypatch.setattr(module, "load_nvrtc", missing)
    with pytest.raises(MissingDevice, match="no NVRTC"):
        build(path, tmp_path / "e", **given)
    assert backend.find_missing_builder("cuda") == "no NVRTC"
    assert not [*tmp_path.iterdir()]


def test_an_engine_says_which_gpu_it_needs(path_of, without_nvrtc, tmp_path, monkeypatch):
    path, out = path_of("bert-int8-linears", 32), tmp_path / "model.engine"
    given = {"profiles": [PROFILE], "expected_gemms": [], "expected_attention": 0}
    built = build(path, out, backend="cuda", **given)
    assert built.compute_capability == [*names.NAMES[1:]]  # Turing has no FP16 attention
    if find_gpu() is None:
        with pytest.raises(MissingDevice, match="and torch shows no GPU; install"):
            CompiledEngine(out, path)
    build(path, out, backend="cuda", compute_capability=["9.0", "8.9"], **given)
    assert check_sidecar(out, path).compute_capability == ["8.9", "9.0"]
    build(path, out, backend="cuda", compute_capability="9.0", **given)
    monkeypatch.setattr("qdqbench.quantize.engine.sidecar.find_gpu", lambda: Gpu("L4", "8.9", None))
    with pytest.raises(UserError, match=r"is for compute capability 9\.0 and the L4.*with --target for it"):
        check_sidecar(out, path)


@pytest.mark.parametrize(
    "case", [("bert-int8-attention", 32), ("bert-int8-residual-fused", 32), ("questions",)], ids=str
)
@pytest.mark.usefixtures("in_fp32")
def test_a_cut_graph_takes_and_gives_states(case, graph_of):
    whole = graph_of(*case)
    stitched = stitch(whole, family_named("bert"))
    plan, arrays = pack(match_graph(stitched.model))
    assert len(plan.given) == len(plan.states) == len({each.input for each in stitched.blocks}) - 1
    batch = batch_for(whole, (9, 4, 16))
    random, width = np.random.default_rng(0), plan.tensors[plan.given[0]].width
    batch |= {name: random.normal(size=(3, 16, width)).astype(np.float32) for name in plan.given}
    wanted, found = run_outputs(stitched.model, batch), interpret(plan, arrays, batch)
    assert found.keys() == wanted.keys()
    kept = batch["attention_mask"].astype(bool)
    for name, exact in wanted.items():
        got, seen = (each[kept] if exact.ndim == 3 else each for each in (found[name], exact))
        assert np.sqrt(np.square(got - seen).sum() / np.square(seen).sum()) < 0.005, name
