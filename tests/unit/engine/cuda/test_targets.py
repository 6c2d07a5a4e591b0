"""What kernels of backend cuda are compiled for: the target of each GPU, and what compilers make of them."""

import hashlib
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.engine.cuda import compile as kernels
from qdqbench.quantize.engine.cuda import runtime
from qdqbench.quantize.engine.cuda import tiles as tile_files
from qdqbench.quantize.engine.cuda.driver import GemmArguments
from qdqbench.quantize.engine.cuda.names import (
    ATTENTION_SIZES,
    BROAD,
    NAMES,
    NARROW,
    NORM_PARTS,
    SLIM,
    STATIONARY,
    TARGETS,
    choose_targets,
    explain_misfit,
    find_target,
    gemm_name,
    list_kernels,
    list_tiles,
    most_codes,
)
from qdqbench.quantize.engine.cuda.runtime import NORM_BLOCKS, choose_heads, fit_attention
from qdqbench.quantize.engine.cuda.tiles import MOST_ITEMS, TileFile, guess_form, list_forms, may_split
from qdqbench.quantize.utils.errors import QdqError, UserError

from ....support.cubins import read_resources
from ....support.cuda_kernels import EPILOGUES, make_gemm
from ....support.long import mark_long

HOPPER, AMPERE = find_target("9.0"), find_target("8.0")
SHARED_KB = {"7.5": 64, "8.0": 164, "8.6": 100, "8.9": 100, "9.0": 228, "12.0": 100}  # of a multiprocessor
FORM = "false, false, GELU_TANH, NO_RESIDUAL, true)"
SIZES = {"128_128": "2, 128, 5", "64_128": "1, 128, 8", "64_64": "1, 64, 12"}
# of Hopper's kernels but attention, by NVRTC 13.0: what was measured is what is shipped
KNOWN = {
    "gemm": (
        "\n".join(f"GEMM_OF(gemm_{tile}_gelu_tanh_none_int8, {size}, {FORM}" for tile, size in SIZES.items()),
        "2c1fe5d6b6e4e649",
    ),
    "head": ("", "aa05322300018823"),
    "norm": ("NORM(6, 1)", "de71e29ae08b2ccd"),
}
BY_MMA = [target.name for target in TARGETS if not target.wgmma and target.name in SHARED_KB]


@pytest.mark.parametrize(
    ("capability", "built", "name"),
    [
        *((name, NAMES, name) for name in SHARED_KB),
        ("8.7", NAMES, "8.6"),
        ("12.1", NAMES, "12.0"),
        ("10.0", NAMES, "8.0+PTX"),  # mma.sync
        ("11.0", NAMES, "8.0+PTX"),
        ("8.9", ["8.0", "9.0"], "8.0"),
        ("9.0", ["8.0+PTX", "8.9"], "8.0+PTX"),
        ("8.0", ["8.6", "8.0+PTX"], "8.0+PTX"),
    ],
)
def test_a_gpu_takes_its_own_target_or_the_nearest_older_one(capability, built, name):
    assert find_target(capability, built).name == name


@pytest.mark.parametrize(
    ("capability", "built", "why"),
    [
        ("10.3", NAMES, "does not run on compute capability 10.3: it has few INT8 units"),
        ("7.0", NAMES, "runs on compute capability 7.5 and newer, not on 7.0"),
        (
            "8.0",
            ["8.6", "9.0"],
            "is for compute capability 8.6, 9.0, and this GPU has 8.0; build it with --target",
        ),
        (
            "12.0",
            ["9.0"],
            "is for compute capability 9.0, and this GPU has 12.0; build it with --target 12.0",
        ),
        (
            "7.5",
            ["8.0+PTX"],
            "is for compute capability 8.0.PTX, and this GPU has 7.5; build it with --target",
        ),
    ],
)
def test_a_gpu_that_takes_none_is_told_why(capability, built, why):
    assert find_target(capability, built) is None
    assert why.replace(".PTX", "+PTX") in explain_misfit(capability, built)


def test_an_engine_is_built_for_the_gpu_here_or_for_all():
    plan, _ = make_gemm(64, 64, None, None, "int8")
    assert choose_targets([], None, plan) == TARGETS
    assert choose_targets([], "6.1", plan) == TARGETS
    for wanted, here, found in (
        ([], "8.7", ["8.6"]),
        (["9.0", "10.0", "8.9"], "8.0", ["8.9", "9.0", "8.0+PTX"]),
    ):
        assert [each.name for each in choose_targets(wanted, here, plan)] == found
    with pytest.raises(UserError, match="few INT8 units"):
        choose_targets([], "10.3", plan)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_blocks_fit_into_the_shared_memory_of_their_gpus(target):
    room = SHARED_KB.get(target.name, 164) * 1024
    for tile in target.tiles if not target.wgmma else ():
        assert tile.shared <= target.shared
        assert tile.blocks * (tile.shared + 1024 * (target.name != "7.5")) <= room
        threads = 32 * tile.warps[0] * tile.warps[1]
        assert tile.blocks * threads <= 1024
    assert fit_attention(1, 128, ATTENTION_SIZES[-1]) <= target.shared
    most = choose_heads(1 << 16, 12, 128, 64, 1)
    assert fit_attention(most, 128, 64) <= target.shared


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_the_broad_tile_is_where_a_gpu_ran_it(epilogue):
    plan, _ = make_gemm(64, 64, *epilogue)
    assert (BROAD in list_tiles(plan.operations[2], plan, HOPPER)) == (epilogue[1:] == ("int8", "fp16"))


@pytest.mark.parametrize("tile", [*HOPPER.tiles, NARROW, SLIM, BROAD, STATIONARY], ids=str)
def test_blocks_of_hopper_fit_a_multiprocessor(tile, monkeypatch):
    launches = []
    monkeypatch.setattr(runtime, "map_tiles", lambda *_: None)
    device = SimpleNamespace(
        launch=lambda name, grid, block, arguments, shared: launches.append((grid, shared))
    )
    runtime.launch_gemm(device, "a", tile, 132, None, None, GemmArguments(m=16384, n=3072, k=768))
    (((grid, _), shared),) = launches
    assert grid == 132 * tile.blocks
    assert shared <= HOPPER.shared
    assert tile.blocks * (shared + 1024) <= SHARED_KB["9.0"] * 1024


def test_kernels_of_hopper_are_those_that_were_measured(nvrtc):
    parts = kernels.c.c_int(), kernels.c.c_int()
    nvrtc.nvrtcVersion(*map(kernels.c.byref, parts))
    if (version := tuple(part.value for part in parts)) != (13, 0):
        pytest.skip(f"digests are of NVRTC 13.0, not {version}")
    made = {name: kernels.compile_source(name, [line], HOPPER) for name, (line, _) in KNOWN.items()}
    assert {name: hashlib.sha256(code).hexdigest()[:16] for name, code in made.items()} == {
        name: digest for name, (_, digest) in KNOWN.items()
    }


@pytest.mark.parametrize("name", [*BY_MMA, "9.0"])
@pytest.mark.parametrize("epilogue", mark_long(EPILOGUES, {*EPILOGUES} - {EPILOGUES[2]}), ids=str)
def test_gemms_keep_their_sums_in_registers(name, epilogue, nvrtc):
    target, (plan, _) = find_target(name), make_gemm(64, 64, *epilogue)
    ((source, lines),) = [each for each in kernels.list_lines([plan], target).items() if each[0] != "norm"]
    found = read_resources(kernels.compile_source(source, lines, target))
    assert found.keys() == {each for each in list_kernels(plan, target) if each.startswith("gemm")}
    for tile in list_tiles(plan.operations[2], plan, target):
        registers, stack = found[f"gemm_{tile}_{gemm_name(plan.operations[2], plan)}"]
        if target.wgmma:
            given = {96: 128, 168: 240}[registers]  # of two groups; the one that loads keeps 24
            assert 24 + 2 * given <= 3 * registers
            few = tile.m == 64 and epilogue[0] in {None, "gelu_tanh"} and epilogue[1] != "fp16"
            assert ((registers == 96), stack) == (few, 0)
        else:
            assert stack <= 16 * (epilogue[0] == "gelu")  # erf, outside of the loop
        threads = 384 if target.wgmma else 32 * tile.warps[0] * tile.warps[1]
        assert registers * threads * tile.blocks <= 1 << 16


@pytest.mark.parametrize("name", mark_long([*BY_MMA, "9.0"], {*BY_MMA} - {"8.0"}))
def test_attention_keeps_nearly_all_in_registers(name, nvrtc):
    forms = [("ROW_MAX", "false"), ("ROW_MAX", "true"), ("PLAIN", "false")]
    lines = [
        f"ATTENTION({size}_{form}_{biased}, {size}, true, {form}, {biased})"
        for size in ATTENTION_SIZES
        for form, biased in forms
    ]
    found = read_resources(kernels.compile_source("attention", lines, find_target(name)))
    found = {kernel: each for kernel, each in found.items() if kernel.startswith("attention_")}
    assert len(found) == 2 * len(lines)
    for kernel, (registers, stack) in found.items():
        assert registers * 128 * (2 if kernel.startswith("attention_128") else 3) <= 1 << 16
        assert stack <= 96, kernel


@pytest.mark.parametrize("name", mark_long([*BY_MMA, "9.0"], {*BY_MMA, "9.0"} - {"8.0", "12.0"}))
def test_norms_keep_nearly_all_in_registers(name, nvrtc):
    """As many blocks fit as are launched; with more codes, and few channels, one does."""
    forms = [(parts, codes) for parts in NORM_PARTS for codes in range(most_codes(128 * parts) + 1)]
    lines = [f"NORM({parts}, {codes})" for parts, codes in forms]
    found = read_resources(kernels.compile_source("norm", lines, find_target(name)))
    for parts, codes in forms:
        registers, stack = found[f"norm_{parts}_{codes}"]
        blocks = 1 if parts <= 6 and codes > 1 else NORM_BLOCKS[parts]
        assert registers <= (1 << 16) // (128 * blocks) // 8 * 8, (parts, codes)
        assert stack <= 24, (parts, codes)


def test_an_old_nvrtc_names_what_it_does_not_compile_for(nvrtc, monkeypatch):
    monkeypatch.setattr(kernels, "_number", lambda target: 133)
    plan, _ = make_gemm(64, 64, None, None, "int8")
    message = r"NVRTC 13\.\d+ does not compile for compute capability 8\.0; pip install .*--target"
    with pytest.raises(UserError, match=message):
        kernels.compile_kernels(plan, [AMPERE])


SIZES = (
    st.integers(1, 1 << 16),
    st.integers(1, 512).map(lambda n: 16 * n),
    st.integers(1, 512).map(lambda k: 16 * k),
)


@given(*SIZES, st.integers(1, 200), st.sampled_from(BY_MMA).map(find_target))
def test_every_form_has_room_for_its_sums(m, n, k, multiprocessors, target):
    forms = list_forms(m, n, k, multiprocessors, target.tiles)
    assert guess_form(m, n, k, multiprocessors, target.tiles) in forms
    for form in forms:
        assert may_split(form, m, n, k, multiprocessors)
        items = -(-m // form.m) * -(-n // form.n) * form.parts
        assert form.parts == 1 or (items <= MOST_ITEMS * multiprocessors and form.parts <= -(-k // form.k))


def test_a_gemm_whose_sums_have_no_room_is_not_launched():
    form, call = AMPERE.tiles[-1]._replace(parts=8), GemmArguments(m=320, n=1536, k=3072)
    with pytest.raises(QdqError, match="gemm_32_64 of 320 x 1536 has no room for the sums of 8 parts"):
        runtime.launch_gemm(None, "none", form, 132, None, None, call, scratch=0)


def test_the_fastest_tiles_are_kept_and_hostile_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A100")
    path, codes, form = tmp_path / "x.tiles.json", {"gemm": b"code"}, AMPERE.tiles[-1]._replace(parts=4)
    first = TileFile(path, codes, AMPERE)
    assert first.get("none_none_int8", 128, 768, 3072, 108) is None
    first.add(form, "none_none_int8", 128, 768, 3072)
    first.keep()
    assert [*tmp_path.iterdir()] == [path]
    again = TileFile(path, codes, AMPERE)
    assert again.get("none_none_int8", 127, 768, 3072, 108) == form
    assert again.get("none_none_int8", 128, 768, 3072, 4) is None  # no room for its sums
    assert TileFile(path, {"gemm": b"other"}, AMPERE).get("none_none_int8", 128, 768, 3072, 108) is None
    (place,) = json.loads(path.read_text())
    hostile = json.dumps({place: [1]}), json.dumps({place: {"a": [9e9, None]}})
    for text in ("", "[]", "{", '{"x": 1}', *hostile, "[" * 9999):
        path.write_text(text)
        TileFile(path, codes, AMPERE).keep()
    monkeypatch.setattr(tile_files, "_MOST_CACHE", 1)
    assert TileFile(path, codes, AMPERE).get("a", 1, 16, 16, 1) is None
    TileFile(tmp_path / "none" / "x", codes, AMPERE).keep()  # nothing can be written there
