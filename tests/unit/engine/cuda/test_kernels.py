"""The kernels themselves, compiled for this CPU, against the interpreter of their plan."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.quantize.engine.cuda import runtime
from qdqbench.quantize.engine.cuda.check import require_kernels
from qdqbench.quantize.engine.cuda.driver import AttentionArguments
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.names import NORM_PARTS, TARGETS, list_kernels, most_codes
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.engine.cuda.plan import Attention
from qdqbench.quantize.engine.cuda.tiles import MOST_ITEMS
from qdqbench.quantize.engine.cuda.tokens import pack_tokens
from qdqbench.quantize.utils.errors import UserError

from ....support.cuda_graphs import batch_for
from ....support.cuda_kernels import (
    DENSE,
    EPILOGUES,
    TILED,
    compare_dense,
    compare_kernels,
    give_states,
    make_gemm,
    make_norm,
)
from ....support.emulate import COMPILER, HOPPER, EmulatedEngine, Emulator, compile_kernels, map_tiles
from ....support.long import mark_long

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
RECIPES = ["bert-int8-attention", "bert-int8-residual", "bert-int8-residual-fused"]
FIXED = [("bert-int8-attention fixed", 32), ("bert-int8-residual-fused fixed", 64)]
BIASED = [("mpnet-int8-attention fixed", 32), ("mpnet-int8-residual-fused", 64)]
LARGE = [("bert-int8-residual-fused", 96), ("mpnet-int8-attention fixed", 128)]
ODD = [("bert-int8-residual", 26), ("mpnet-int8-residual-fused", 26)]  # 52 channels
ROTARY = [("modernbert-int8-attention", 32), ("modernbert-int8-linears", 64)]
CASES = [*product(RECIPES, (32, 64)), *FIXED, *BIASED, *LARGE, *ODD, *ROTARY, ("bert-int8-linears", 32)]
OTHERS = {target.name: target for target in TARGETS if target.name in ("7.5", "8.6")}  # two ways of mma.sync
FORMS = [
    (name, tile._replace(parts=parts))
    for name, target in OTHERS.items()
    for tile in target.tiles
    for parts in ((1, 3) if tile.splits else (1,))
]
SHORT = [CASES[0], *CASES[5:]]  # these have every kernel of the others


@pytest.fixture(autouse=True)
def tiles_for_the_emulator(monkeypatch):
    monkeypatch.setattr(runtime, "map_tiles", map_tiles)


@pytest.fixture(scope="module")
def packed(graph_of):
    """The graph, plan and arrays of a case."""

    @cache
    def make(*case):
        graph = graph_of(*case)
        return graph, *pack(match_graph(graph))

    return make


@pytest.fixture(scope="module")
def emulator(packed, made_once):
    plans = [packed(*case)[1] for case in SHORT] + [make_gemm(64, 64, *each)[0] for each in EPILOGUES]
    sizes = ((128 * parts, codes) for parts, codes in product(NORM_PARTS, range(4)))
    plans += [make_norm(width, codes)[0] for width, codes in sizes if codes <= most_codes(width)]
    plans.append(DENSE[0].plan())
    return Emulator(made_once("emulated", lambda folder: compile_kernels(plans, folder)))


@pytest.fixture(scope="module")
def portable(emulator, made_once):
    """Emulators of GEMMs by mma.sync, beside the other kernels."""

    def compile_for(target):
        plans = [make_gemm(64, 64, *each)[0] for each in EPILOGUES]
        return made_once(
            f"emulated-{target.name}", lambda folder: compile_kernels(plans, folder, target, "gemm_mma")
        )

    return {name: Emulator(compile_for(target), emulator.folder) for name, target in OTHERS.items()}


@pytest.mark.parametrize("case", mark_long(CASES, {*CASES} - {*SHORT}), ids=str)
@pytest.mark.parametrize("lengths", mark_long([(9, 4, 16), (129, 1, 1), (150, 30)], [(129, 1, 1)]), ids=str)
def test_every_kernel_makes_what_the_interpreter_makes(case, lengths, packed, emulator):
    graph, plan, arrays = packed(*case)
    compare_kernels(
        EmulatedEngine(plan, arrays, emulator), pack_tokens(plan, arrays, batch_for(graph, lengths))
    )


@pytest.mark.long
def test_short_cases_have_every_kernel(packed):
    first, all_of_them = (
        {name for case in cases for name in list_kernels(packed(*case)[1], HOPPER)}
        for cases in (SHORT, CASES)
    )
    assert first == all_of_them


@given(lengths=st.lists(st.integers(1, 140), min_size=1, max_size=3), heads=st.integers(1, 2))
@settings(max_examples=2)
@pytest.mark.parametrize("case", mark_long(CASES[:-1], {*CASES} - {*SHORT}), ids=str)
def test_kernels_take_any_lengths_of_rows(packed, emulator, lengths, case, heads):
    graph, plan, arrays = packed(*case)
    tokens = pack_tokens(plan, arrays, batch_for(graph, (*lengths,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "choose_heads", lambda *_: heads)  # of a block, one after the other
        compare_kernels(EmulatedEngine(plan, arrays, emulator), tokens)


@pytest.mark.parametrize("window", mark_long([1, 64, 100, 300], [1, 100, 300]))
def test_windows_of_any_width(packed, emulator, window):
    """Of all layers; the keys of a block are one load, or several."""
    graph, plan, arrays = packed(*ROTARY[0])
    windows = (
        replace(each, window=window) if isinstance(each, Attention) else each for each in plan.operations
    )
    plan = replace(plan, operations=tuple(windows))
    lengths = (300, 5, 160)
    engine = EmulatedEngine(plan, arrays, emulator)
    compare_kernels(engine, pack_tokens(plan, arrays, batch_for(graph, lengths)))


@pytest.mark.parametrize("name", OTHERS)
def test_every_kernel_by_mma_sync_makes_what_the_interpreter_makes(name, packed, portable):
    graph, plan, arrays = packed(*SHORT[1])
    engine = EmulatedEngine(plan, arrays, portable[name], target=OTHERS[name])
    compare_kernels(engine, pack_tokens(plan, arrays, batch_for(graph, (150, 30))))


def compare_gemm(emulator, epilogue, tile, sizes, blocks, *, target=HOPPER):
    m, n, k = sizes[0], 16 * sizes[1], 16 * sizes[2]
    plan, arrays = make_gemm(k, n, *epilogue)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "choose_tile", lambda *_: tile)
        patch.setattr(runtime, "guess_form", lambda *_: tile)
        tokens = give_states([m], {"x": k, "r": n})
        engine = EmulatedEngine(plan, arrays, emulator, blocks, target)
        compare_kernels(engine, tokens)
        assert not engine._scratch[: MOST_ITEMS * blocks].any()  # for the next launch


@given(sizes=st.tuples(st.integers(1, 150), st.integers(1, 20), st.integers(1, 20)), blocks=st.integers(1, 4))
@settings(max_examples=5)
@pytest.mark.parametrize(("epilogue", "tile"), [each for each in TILED if not each[1].stationary], ids=str)
def test_gemms_of_any_size(emulator, epilogue, tile, sizes, blocks):
    compare_gemm(emulator, epilogue, tile, sizes, blocks)


@given(sizes=st.tuples(st.integers(1, 64), st.integers(1, 9), st.integers(1, 40)), blocks=st.integers(1, 3))
@settings(max_examples=2)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}_{form[1]}_{form[1].parts}")
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_gemms_of_any_size_by_mma_sync(portable, epilogue, form, sizes, blocks):
    name, tile = form
    if tile.parts > 1:  # there is room for their sums, and a block of K for each
        sizes, blocks = (*sizes[:2], sizes[2] + 32), blocks + 7
    compare_gemm(portable[name], epilogue, tile, sizes, blocks, target=OTHERS[name])


@given(
    sizes=st.tuples(st.integers(1, 400), st.integers(1, 24), st.integers(33, 64)), blocks=st.integers(1, 4)
)
@settings(max_examples=5)
@pytest.mark.parametrize(("epilogue", "tile"), [each for each in TILED if each[1].stationary], ids=str)
def test_gemms_whose_weights_stay(emulator, epilogue, tile, sizes, blocks):
    compare_gemm(emulator, epilogue, tile, sizes, blocks)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_codes_of_an_activation_in_fp16(emulator, activation):
    plan, arrays = make_gemm(64, 48, activation, None, "int8")
    gemm = replace(plan.operations[2], input="x", weight="fp16")
    weight = arrays.pop("g.weight") * arrays.pop("g.scale")[:, None] * 30
    arrays |= {"g.weight": weight.astype(np.float16), "g.bias": arrays["g.bias"].astype(np.float16)}
    plan = replace(plan, operations=(*plan.operations[:2], gemm, plan.head))
    compare_kernels(EmulatedEngine(plan, arrays, emulator), give_states([150], {"x": 64, "r": 48}))


@pytest.mark.parametrize("codes", range(4))
@pytest.mark.parametrize("width", [8, 384, 392, 768, 1016, 1024, 1032, 2048, 4096])
def test_norms_of_any_width(emulator, width, codes):
    plan, arrays = make_norm(width, codes)
    if codes > most_codes(width):
        with pytest.raises(UserError, match=f"LayerNorm of {width} channels writes codes of up to 1 quanti"):
            require_kernels(plan)
        return
    require_kernels(plan)
    compare_kernels(EmulatedEngine(plan, arrays, emulator), give_states([37], {"x": width}))


@pytest.mark.parametrize("dense", [each for each in DENSE if len(each.lengths) < 100], ids=str)
def test_dense_steps_of_a_head(emulator, dense):
    plan = dense.plan()
    compare_dense(dense, EmulatedEngine(plan, dense.arrays(), emulator), dense.tokens())


def test_the_emulator_says_what_is_wrong(emulator):
    call = AttentionArguments()
    with pytest.raises(AssertionError, match="no block has so much shared memory"):
        emulator.launch("attention_64_int8_plain_long", (1, 1), 128, [call], 1 << 20)
