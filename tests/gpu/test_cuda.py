"""Kernels of backend cuda on a Hopper GPU: each against the interpreter, and whole engines."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import pytest

from qdqbench.eval.bench.results import read_bench, row_of
from qdqbench.eval.selection.search.results import read_search
from qdqbench.eval.verification.bisect import bisect_kernels
from qdqbench.eval.verification.blocks import stitch
from qdqbench.quantize.deployment.opened import Answering
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.cuda import runtime
from qdqbench.quantize.engine.cuda.compile import compile_kernels, load_nvrtc
from qdqbench.quantize.engine.cuda.interpret import compute, interpret
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.model import load_kernels
from qdqbench.quantize.engine.cuda.names import (
    TARGETS,
    count_columns,
    find_target,
    list_kernels,
    most_codes,
)
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.engine.cuda.plan import Attention, Head, Linear
from qdqbench.quantize.engine.cuda.runtime import PACKED, CudaEngine, choose_bucket, choose_graph, fill
from qdqbench.quantize.engine.cuda.tiles import may_split
from qdqbench.quantize.engine.cuda.tokens import MOST_TOKENS, pack_tokens
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.runtime.runners import open_engine, open_runner
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.standalone.server.engine import warm_up
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.system.gpu import find_gpu

from ..integration.tiny import EVAL_ROWS, call, call_alone, results
from ..support.cuda_graphs import HEADS, batch_for, write_head, write_wide
from ..support.cuda_kernels import (
    DENSE,
    EPILOGUES,
    TILED,
    compare,
    compare_dense,
    compare_kernels,
    give_states,
    make_gemm,
    make_norm,
)

PROFILE = Profile((1, 1), (8, 64), (128, 512))
CASES = [  # recipe, size of heads, target; None: this GPU's own
    *(
        (recipe, size, None)
        for recipe in ("bert-int8-attention", "bert-int8-residual-fused")
        for size in (32, 64)
    ),
    ("bert-int8-linears", 64, None),
    ("bert-int8-residual", 64, None),
    ("bert-int8-ffn", 64, None),
    ("bert-int8-attention", 32, "8.0+PTX"),
    ("bert-int8-residual-fused", 64, "8.0+PTX"),
    ("bert-int8-attention fixed", 32, None),
    ("bert-int8-residual-fused fixed", 64, None),
    ("bert-int8-residual-fused fixed", 64, "8.0+PTX"),
    ("mpnet-int8-residual-fused", 64, None),
    ("mpnet-int8-attention fixed", 32, "8.0+PTX"),
    ("bert-int8-residual-fused", 24, None),  # padded to 32
    ("mpnet-int8-attention", 48, None),
    ("bert-int8-attention", 48, "8.0+PTX"),
    ("bert-int8-residual-fused", 28, None),  # with 56 channels
    ("bert-int8-attention", 28, "8.0+PTX"),
    ("bert-int8-residual-fused", 96, None),  # padded to 128
    ("mpnet-int8-residual-fused", 96, None),
    ("bert-int8-attention", 128, None),
    ("bert-int8-attention fixed", 128, "8.0+PTX"),
    ("modernbert-int8-attention", 64, None),
    ("modernbert-int8-attention", 24, "8.0+PTX"),
    ("modernbert-int8-linears", 64, None),
    ("modernbert-int8-ffn", 32, None),
]
OTHERS = {  # what this GPU can run of other targets: PTX, which the driver compiles, and mma.sync on Hopper
    target.name: target._replace(code=target.code.replace("sm", "compute").rstrip("a"), wgmma=False)
    for target in TARGETS
    if target.name in ("7.5", "8.0", "8.6", "8.9", "9.0")
}
OTHERS["9.0"] = OTHERS["9.0"]._replace(tiles=OTHERS["8.0"].tiles)
SANITIZED = {  # kernels, and tests that launch them
    "hopper": ("gemm", "gemms_make and small"),
    **{name: ("gemm", f"same_bits and small and {name}") for name in OTHERS},
    "attention": ("attention", "every_kernel and (lengths2 or lengths6) and (fused-96 or modernbert-int8-a)"),
    "norm": ("norm", "norms"),
    "head": ("head", "dense_steps and not 300"),  # of 300 PyTorch takes: racecheck ends in it
}
DRAWS, SEED = (int(os.environ.get(name, least)) for name, least in (("DRAWS", 200), ("SEED", 0)))


@pytest.fixture(scope="module", autouse=True)
def needs_a_gpu() -> None:
    gpu = find_gpu()
    if gpu is None or find_target(gpu.compute_capability) is None:
        pytest.skip("no GPU that the kernels are for")
    try:
        load_nvrtc()
    except MissingDevice as error:
        pytest.skip(str(error))


def own_target():
    return find_target(find_gpu().compute_capability)


def family_of(engine):
    untyped = "mpnet" if engine.plan.embed.placed else "modernbert"
    return family_named("bert" if engine.plan.embed.typed else untyped)


def built(graph, folder, target=None):
    given = {"profiles": [PROFILE], "expected_gemms": [], "expected_attention": 0}
    build(graph, folder / "e", backend="cuda", compute_capability=target, **given)
    return folder / "e"


def loaded(plan, arrays, target):
    return CudaEngine(plan, arrays, compile_kernels(plan, [target])[target.name], target)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request, made_once, tmp_path_factory):
    """A graph, its file, and the engine of it."""
    name, size, target = request.param
    path = made_once(f"cuda-wide-{name}-{size}", lambda folder: write_wide(folder, name, size)) / "model.onnx"
    engine, _ = load_kernels(built(path, tmp_path_factory.mktemp("engine"), target))
    return onnx.load(path), path, engine


@pytest.mark.parametrize(
    "lengths", [(1,), (64,), (65, 63), (128,), (129, 1, 1), (384,), (385, 127), (512,), (9, 4, 16) * 60]
)
def test_every_kernel_makes_what_the_interpreter_makes(case, lengths):
    graph, _, engine = case
    compare_kernels(engine, pack_tokens(engine.plan, engine.arrays, batch_for(graph, lengths)))


def test_kernels_take_any_lengths_of_rows(case):
    graph, _, engine = case
    random = np.random.default_rng(SEED)
    for draw in range(DRAWS // len(CASES) + 1):
        most = int(random.choice([4, 40, 130, 512]))
        lengths = random.integers(1, most + 1, int(random.integers(1, min(40, 3 + 2000 // most))))
        batch = batch_for(graph, tuple(map(int, lengths)), SEED + draw)
        compare_kernels(engine, pack_tokens(engine.plan, engine.arrays, batch))


def test_graphs_answer_as_single_launches_do_in_any_order(case):
    graph, _, engine = case
    random = np.random.default_rng(1)
    batches = [batch_for(graph, tuple(map(int, random.integers(1, 130, 12))), seed) for seed in range(6)]
    first = [engine.run(batch) for batch in batches]
    for number in random.permutation(np.repeat(range(6), 3)):
        for name, answer in engine.run(batches[number]).items():
            assert (answer == first[number][name]).all()
    for batch, answers in zip(batches, first, strict=True):
        tokens = pack_tokens(engine.plan, engine.arrays, batch)
        alone = engine.unpack(tokens, engine.forward(engine.load(tokens)))
        wanted = interpret(engine.plan, engine.arrays, batch)
        for name, answer in answers.items():
            assert np.abs(answer - alone[name]).max() <= 1e-3 * np.abs(answer).max()
            assert np.abs(answer - wanted[name]).max() <= 0.2 * np.abs(wanted[name]).max()


@cache
def codes_of(epilogue, target):
    """Return the kernels of a GEMM, which take all sizes."""
    plan, _ = make_gemm(64, 64, *epilogue)
    return compile_kernels(plan, [target])[target.name]


def name_sizes(sizes):
    """Return the name of M, N and K, with a word for what sanitizers can run in seconds."""
    return ("small " if math.prod(sizes) < 1 << 26 else "") + "x".join(map(str, sizes))


@pytest.mark.parametrize("sizes", [(900, 528, 1024), (300, 272, 592), (70, 48, 1008)], ids=name_sizes)
@pytest.mark.parametrize(("epilogue", "tile"), TILED, ids=str)
def test_gemms_make_what_the_interpreter_makes(epilogue, tile, sizes, monkeypatch):
    """On three blocks, so that each makes many tiles, in other columns too."""
    if not own_target().wgmma:
        pytest.skip("the GEMMs of Hopper")
    monkeypatch.setattr(runtime, "choose_tile", lambda *_: tile)
    m, n, k = sizes
    plan, arrays = make_gemm(k, n, *epilogue)
    engine = CudaEngine(plan, arrays, codes_of(epilogue, own_target()), own_target())
    engine._multiprocessors = 3
    compare_kernels(engine, give_states([m], {"x": k, "r": n}))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(900, 528, 1024), (257, 768, 3072), (70, 48, 2000), (1, 16, 16)], ids=name_sizes
)
def test_other_targets_make_the_same_bits(sizes, epilogue, name, monkeypatch):
    own, other = own_target(), OTHERS[name]
    m, n, k = sizes
    plan, arrays = make_gemm(k, n, *epilogue)
    tokens = give_states([m], {"x": k, "r": n})
    first, second = (CudaEngine(plan, arrays, codes_of(epilogue, each), each) for each in (own, other))
    forms = [tile._replace(parts=parts) for tile in other.tiles for parts in (1, 2, 4, 8)]
    columns = count_columns(plan.operations[2], plan)  # a gate has columns too
    wanted = answer_of(first, tokens)
    for form in forms:
        if may_split(form, choose_bucket(m), columns, k, second._multiprocessors):
            monkeypatch.setattr(runtime, "guess_form", lambda *_, form=form: form)
            assert answer_of(second, tokens) == wanted, form


@pytest.mark.long
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("name", SANITIZED)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizers_find_nothing(tool, name):
    """Each tensor has memory of its own, so that no other is next to it."""
    kernels, tests = SANITIZED[name]
    command = f"compute-sanitizer --error-exitcode 1 --tool {tool} --kernel-name kns={kernels}".split()
    command += [sys.executable, "-m", "pytest", "-q", __file__, "-k", tests]
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    alone["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    ran = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]


def answer_of(engine, tokens):
    """Return the bytes that a GEMM makes."""
    kept = {}
    engine.forward(engine.load(tokens), kept)
    return kept["y"][: len(tokens.ids)].cpu().numpy().tobytes()


def test_tiles_are_timed_once_and_kept(made_once, tmp_path):
    folder = made_once(
        "cuda-wide-bert-int8-residual-fused-64", lambda path: write_wide(path, CASES[3][0], 64)
    )
    path, answers = built(folder / "model.onnx", tmp_path, "8.0+PTX"), []
    batch = batch_for(onnx.load(folder / "model.onnx"), (100, 30, 5))
    for _ in range(2):
        engine, _ = load_kernels(path)
        before = engine._tiles._tiles.copy()
        answers.append(engine.run(batch)["logits"])
        kept = json.loads(path.with_name("e.tiles.json").read_text())
        assert engine._tiles._tiles == next(iter(kept.values()))
        assert bool(before) is (len(answers) == 2)
    assert (answers[0] == answers[1]).all()


@pytest.mark.parametrize("codes", [1, 3])
@pytest.mark.parametrize("width", [312, 768, 1024, 1032, 2048, 4096])
def test_norms_make_what_the_interpreter_makes(width, codes):
    plan, arrays = make_norm(width, min(codes, most_codes(width)))
    compare_kernels(loaded(plan, arrays, own_target()), give_states([1, 900], {"x": width}))


@pytest.mark.parametrize("head", HEADS)
def test_every_head_answers_as_the_interpreter(head, made_once):
    """The head alone is fed, by the interpreter."""
    import torch

    folder = made_once(f"cuda-{head}", lambda path: write_head(path, head))
    graph = onnx.load(folder / "model.onnx")
    plan, arrays = pack(match_graph(graph))
    batch = batch_for(graph, (9, 4, 16))
    tokens, values = pack_tokens(plan, arrays, batch), dict[str, np.ndarray]()
    for operation in plan.operations:
        values |= compute(operation, plan, arrays, values, tokens)
    small = replace(plan, operations=(plan.head,))
    engine = loaded(small, arrays, own_target())
    rows = engine.load(tokens)
    state = torch.zeros(len(rows.ids), values[plan.head.input].shape[1], dtype=torch.float16, device="cuda")
    state[: len(tokens.ids)] = torch.from_numpy(values[plan.head.input]).cuda()
    rows.given[plan.head.input] = state
    for name, answer in engine.forward(rows).items():
        compare(name, answer[: len(values[name])].cpu().numpy(), values[name])


@pytest.mark.parametrize("dense", DENSE, ids=str)
def test_dense_steps_of_a_head_are_those_of_numpy(dense):
    plan, arrays, tokens = dense.plan(), dense.arrays(), dense.tokens()
    engine = loaded(plan, arrays, own_target())
    compare_dense(dense, engine, tokens)


@pytest.mark.parametrize("dense", [dense for dense in DENSE if dense.alone], ids=str)
def test_the_kernel_of_a_head_runs_alone(dense):
    engine = loaded(dense.plan(), dense.arrays(), own_target())
    assert [*engine.profile(dense.tokens())[0]] == ["head"]


def test_the_profiler_names_the_kernels_of_the_plan_and_no_others(case):
    graph, _, engine = case
    batch = batch_for(graph, (100, 30, 5))
    engine.run(batch)
    ran = engine.profile(pack_tokens(engine.plan, engine.arrays, batch))
    ours = re.compile(r"(?:gemm|attention|norm|embed)_\w+|quantize|head")
    known = list_kernels(engine.plan, engine.target)
    for operation, kernels in zip(engine.plan.operations, ran, strict=True):
        names = [name for name in kernels if ours.fullmatch(name)]
        int8 = isinstance(operation, Linear) and operation.weight == "int8"
        int8 |= isinstance(operation, Attention) and operation.probability_multiplier is not None
        assert {*names} <= known
        if int8:
            assert len(kernels) == len(names) == 1
        pytorch = isinstance(operation, Head) and any(step.kind == "norm" for step in operation.steps)
        if not (pytorch or isinstance(operation, Linear | Attention)):
            assert [*kernels] == names
        assert all(ms > 0 for ms in kernels.values())
    rows = engine.kernels()
    assert [row.row.onnx for row in rows] == [[*each.nodes] for each in engine.plan.operations]
    assert all(row.ms > 0 for row in rows)


def test_refused_inputs_run_nothing(case):
    graph, _, engine = case
    good = batch_for(graph, (9, 4))
    before = engine.run(good)
    for name, place, value, message in (
        ("input_ids", (1, 0), 60, "row 1 has the token 60"),
        ("input_ids", (1, 0), -1, "row 1 has the token -1"),
        ("attention_mask", (1, slice(None)), 0, "row 1 of the batch has no attended"),
        ("token_type_ids", (0, 0), 2, "row 0 has the type 2"),
    ):
        bad = {key: array.copy() for key, array in good.items()}
        if name not in bad:
            continue
        bad[name][place] = value
        with pytest.raises(UserError, match=message):
            engine.run(bad)
    wide = np.ones((MOST_TOKENS // 512 + 1, 512), np.int64)
    with pytest.raises(UserError, match="give fewer rows"):
        engine.run(dict.fromkeys(good, wide))
    assert all((engine.run(good)[name] == answer).all() for name, answer in before.items())


def test_blocks_of_a_cut_graph_are_those_of_the_interpreter(case, tmp_path):
    graph, _, engine = case
    stitched = stitch(graph, family_of(engine))
    path = tmp_path / "cut.onnx"
    path.write_bytes(stitched.model.SerializeToString())
    with open_engine(built(path, tmp_path), path) as engine:
        plan, arrays = engine._model.plan, engine._model.arrays
        batch, random = batch_for(graph, (60, 4, 16)), np.random.default_rng(0)
        width = plan.tensors[plan.given[0]].width
        batch |= {name: random.normal(size=(3, 60, width)).astype(np.float32) for name in plan.given}
        got, wanted = engine.run(batch), interpret(plan, arrays, batch)
    for name in plan.states:
        assert np.square(got[name] - wanted[name]).sum() <= 0.05**2 * np.square(wanted[name]).sum(), name


def test_a_runner_answers_batches_of_any_shape(case, tmp_path):
    graph, path, engine = case
    with open_runner(built(path, tmp_path), path, pad_id=0) as runner:
        for lengths in ((5,), (17, 3), (130, 1, 64)):
            batch = batch_for(graph, lengths)
            np.testing.assert_allclose(runner(batch), engine.run(batch)["logits"], rtol=1e-3, atol=1e-3)
        times = runner.engine.kernel_times(batch, repeats=2)
        assert times.keys() == {row.name for row in runner.engine.kernels()}
        assert "GPU memory" in str(runner.engine.memory)


@pytest.fixture(scope="module")
def measured(sst2, tmp_path_factory):
    """A bench of MiniLM with random weights, at fixed shapes and on texts."""
    folder, options = tmp_path_factory.mktemp("bench") / "out", ["--set", "engine.backend=cuda"]
    options += ["--recipe", "bert-int8-residual-fused", "--length", 32, "--length", 128, "--batch", 8]
    options += ["--dataset", "sst2", "--data", sst2.data, "--tokenizer", sst2.model, "--dataset-batch", 8]
    options += ["--rounds", 6, "--duration", 0.1, "--compile-seconds", 300]
    for name in ("compile-fp16", "compile-fp16-eager", "autotune-fp16", "torch-fp16-eager"):
        options += ["--exclude", name]
    done = call_alone("bench", "--model", "minilm", "--out", folder, *options)
    assert done.code == 0, done.err
    return read_bench(folder / "bench.json")


def test_a_bench_has_kernels_beside_all_others_on_one_footing(measured):
    assert len(measured.configs) == 3
    assert measured.systems[0].backend.startswith("cuda ")
    for config in measured.configs:
        row, peer = row_of(config, "int8"), row_of(config, "unpadded-fp16")
        states = "; ".join(f"{each.system}: {each.status}, {each.reason}" for each in config.rows)
        assert row is not None, states
        assert peer is not None, states
        assert row.int8_gemms == row.expected_int8_gemms == 6 * (6 + 2)  # linears, and products of attention
        for each in (row, peer):
            assert "CUDA graph" in each.detail
            assert ("the fastest size" in each.detail) == (config.kind == "dataset")
            assert {rate.streams for rate in each.throughput} == ({1, 2} if config.kind == "fixed" else set())
        launches = 1 if config.kind == "fixed" else int(row.detail.split()[2])
        counts = Counter[str]()
        for name, count in row.kernels.names.items():
            if found := re.match(r"(gemm|attention|norm|embed)_\d", name):
                counts[found[1]] += count
        per_launch = {"gemm": 24, "attention": 6, "norm": 12, "embed": 1}
        assert counts == {name: count * launches for name, count in per_launch.items()}
        assert (row.kernels.fused_attention, row.kernels.fp32_gemms) == (6 * launches, 0)
        precision = {about.name: about.precision for about in measured.systems}
        floats = [each for each in config.rows if each.status == "done" and precision[each.system] != "int8"]
        assert config.headline.baseline == min(floats, key=lambda each: each.median_ms).system
        other = [each for each in config.rows if each.system.startswith("int8-")]
        assert all(each.status == "done" or each.reason for each in other)


def test_lanes_of_several_streams_do_not_disturb_each_other(case):
    """Graphs with buffers of their own run at once, and each answers as it does alone."""
    import torch

    graph, _, engine = case
    batches = [batch_for(graph, (64,) * 8, seed) for seed in range(3)]
    tokens = [pack_tokens(engine.plan, engine.arrays, batch) for batch in batches]
    sizes = choose_graph(tokens[0])
    bounds, alone = [engine.bind(512, 8, *sizes[2:]) for _ in batches], []
    for bound, packed in zip(bounds, tokens, strict=True):
        host = np.zeros(5 * 512 + 9, np.int32)
        fill(host, packed, 512, 8)
        bound.inputs[PACKED].copy_(torch.from_numpy(host))
        torch.cuda.synchronize()
        bound.launch()
        torch.cuda.synchronize()
        alone.append({name: value.clone() for name, value in bound.outputs.items()})
        wanted = engine.run(batches[len(alone) - 1])
        for name, answer in alone[-1].items():
            assert np.abs(answer.cpu().numpy() - wanted[name]).max() <= 1e-3 * np.abs(wanted[name]).max()
    others = [
        torch.ones(size, device="cuda") for size in (1 << 8, 1 << 16, 1 << 20, 1 << 24) for _ in range(8)
    ]
    for _ in range(50):
        for bound in bounds:
            bound.launch()
    torch.cuda.synchronize()
    assert all(bool((each == 1).all()) for each in others)  # nothing writes to what was freed
    for bound, answers in zip(bounds, alone, strict=True):
        assert all(torch.equal(bound.outputs[name], answer) for name, answer in answers.items())


def test_a_whole_run_is_proven_verified_evaluated_and_deployed(sst2, tmp_path, capsys):
    done = call(
        capsys, "run", "bert-int8-linears", *sst2.options, "--backend", "cuda", "--out", tmp_path / "run"
    )
    assert done.code in (0, 2), done.err  # a tiny model may lose too much accuracy
    found = results(tmp_path / "run")
    assert found["engine"]["backend"] == "cuda"
    assert found["engine"]["int8_gemms"] == found["engine"]["expected_int8_gemms"] > 0
    assert found["verification"]["blocks"]
    assert not [row for row in found["verification"]["blocks"] if row["error"] > row["limit"]]
    assert found["stages"]["engine"]["n"] == EVAL_ROWS
    for command in (["evaluate"], ["inspect", "--profile", "gpu"], ["inspect", "--bisect"]):
        done = call(capsys, command[0], tmp_path / "run", *command[1:])
        assert done.code in (0, 2), done.err
    assert "no block is wrong" in done.out
    split, _ = Session(read_config(tmp_path / "run"), tmp_path / "run").eval_splits["validation"]
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in ("qdqbench", "pydantic", "safetensors", "onnx"):
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} is not to be needed')\n")
    ran = subprocess.run(
        [sys.executable, tmp_path / "run" / "deploy" / "run_cuda.py"],
        input="".join(f"{text}\n" for text in split.dataset["sentence"]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    made = np.array([[*json.loads(line)["scores"].values()] for line in ran.stdout.splitlines()])
    with np.load(tmp_path / "run" / "logits" / "engine.npz") as saved:
        logits = saved["validation.logits"].astype(np.float64)
    shares = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    np.testing.assert_allclose(made, shares, atol=5e-3)  # in other batches, so by other tiles


def test_a_kernel_with_spoilt_arrays_is_found(case):
    """An engine whose scales of one linear are not those of its graph; the others are right."""
    graph, _, engine = case
    right = bisect_kernels(engine, graph, batch_for(graph), family_of(engine))
    assert (right.block, right.notes[0][:12]) == (None, "every kernel")
    linear = [each for each in engine.plan.operations if isinstance(each, Linear)][-2]
    spoilt = engine._arrays[f"{linear.name}.bias"]
    before = spoilt.clone()
    spoilt += 3 * before.abs().max() + 3
    found = bisect_kernels(engine, graph, batch_for(graph), family_of(engine))
    spoilt.copy_(before)
    assert (found.node, found.operator) == (linear.name, "linear")


def test_a_search_times_engines_and_their_twins(sst2, tmp_path, capsys):
    pytest.importorskip("optuna")
    options = [*sst2.options, "--backend", "cuda", "--set", "calibration.samples=64", "--speed", "latency"]
    options += ["--trials", 5, "--samples", 64, "--batch", 8, "--length", 32, "--out", tmp_path / "out"]
    done = call(capsys, "search", "bert-int8-linears", *options)
    assert done.code in (0, 2), done.err
    found = read_search(tmp_path / "out" / "search.json")
    assert (found.source.mode, found.source.backend) == ("latency", "cuda")
    assert not [trial.failure for trial in found.trials if trial.failure]
    assert all(row.speedup.system_ms > 0 for row in found.confirmed if row.failure is None)


def test_a_run_is_served(sst2, tmp_path, capsys):
    options = [*sst2.options, "--backend", "cuda", "--out", tmp_path / "run"]
    assert call(capsys, "run", "bert-int8-linears", *options).code in (0, 2)
    session = Session(read_config(tmp_path / "run"), tmp_path / "run")
    answering = Answering.of(tmp_path / "run")
    batch = session.eval_splits["validation"][1].batch([*range(13)], 0)[1]
    run, kept = answering.open_engine(), batch["attention_mask"].astype(bool)
    warm_up(run, answering.told, 10.0, 4096)
    given = batch["input_ids"][kept], batch["token_type_ids"][kept], kept.sum(axis=1)
    flights = [run.launch(*given) for _ in range(2)]
    for said in (flight.read() for flight in flights):
        with np.load(tmp_path / "run" / "logits" / "engine.npz") as known:
            np.testing.assert_allclose(said, known["validation.logits"][:13], rtol=2e-2, atol=2e-2)
