"""Rates of layer parity on tiny models: false alarms of healthy graphs, and planted faults that it catches.

    python -m tools.false_alarms [--seeds N] [--families bert,roberta]
    python -m tools.false_alarms [--runs N [--faults N | --odd] | --draws N [--of RUN]]

Healthy: families x recipes x classes x seeds x compute x form of weights. Every second model of a family with
BERT's names has channels that are the same in every token, on a border of rounding. `--runs` takes that many
whole runs on CPU engines instead, counts those whose parity, verification or gate fails, and builds engines
from broken graphs in the first `--faults` of them. With `--odd` the evaluated texts repeat, are few, of one
class or of very different lengths (`ODD`), in turn. `--draws` judges the answers of healthy graphs to such
texts on ONNX Runtime, each text in two batches; with `--of` those of a finished run's engine. Exits with 1
where something healthy fails, or a fault passes or was planted nowhere.
"""

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from tests.support.families import SIZES, write_model
from tests.support.tiny_bert import Quantized, calibrate, copied, padded_batch, tensor
from tests.support.tiny_layer import store

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.eval.metrics.results import Parity
from qdqbench.quantize.calibration.fakequant.quantizers import smooth_input
from qdqbench.quantize.graph import export
from qdqbench.quantize.graph.index import attribute, module_of
from qdqbench.quantize.models.attention import MASK_FILL
from qdqbench.quantize.recipe.schema import Recipe, load_recipe, shipped_recipes

RECIPES = (
    "int8-linears",
    "int8-linears-per-tensor",
    "int8-attention",
    "int8-residual",
    "int8-residual-fused",
)
BERT_NAMES = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
CONSTANT = 4  # channels of each LayerNorm that are the same in every token
Fault = Callable[[onnx.ModelProto], bool]  # in place; whether the graph has what it breaks


def recipes_of(family: str) -> list[Recipe]:
    """Return the shipped recipes of a model type."""
    prefix = "roberta" if family in ("xlm-roberta", "camembert") else family
    names = [name for suffix in RECIPES if (name := f"{prefix}-{suffix}") in shipped_recipes()]
    return [load_recipe(name) for name in names]


def batches(seed: int, pad_id: int) -> list[dict[str, Any]]:
    """Return two padded batches of random tokens."""
    made = [padded_batch((9, 4, 16), seed), padded_batch((12, 12, 3, 7), seed + 1)]
    for batch in made:
        batch["input_ids"] = np.where(batch["attention_mask"] == 1, batch["input_ids"], pad_id)
    return made


def hold_channels(folder: Path) -> None:
    """Give the LayerNorms of a saved model channels that are the same in every token."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        if name.endswith("LayerNorm.weight"):
            value[:CONSTANT] = 0.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def put_on_borders(model: Any) -> int:
    """Move the constant channels of a calibrated model to the nearest border of their reader's codes."""
    modules, moved = dict(model.named_modules()), 0
    for name, quantizer in modules.items():
        if not name.endswith(
            ("intermediate.dense.input_quantizer", "layer.1.attention.self.query.input_quantizer")
        ):
            continue
        layer = name.partition(".intermediate")[0].partition(".1.attention")[0]
        norm = modules.get(
            f"{layer}.attention.output.LayerNorm" if "intermediate" in name else f"{layer}.0.output.LayerNorm"
        )
        if norm is None or quantizer.amax is None:
            continue
        factors = smooth_input(quantizer, torch.ones_like(norm.bias))
        scale = quantizer.amax.float() / 127
        steps = (norm.bias * factors / scale)[:CONSTANT]
        with torch.no_grad():
            norm.bias[:CONSTANT] = ((steps.floor() + 0.5) * scale / factors[:CONSTANT]).float()
        moved += CONSTANT
    return moved


def graphs(quantized: Quantized, recipe: Recipe) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield the finished graph in every compute type and form of weights."""
    traced = export.trace(quantized.model, 20)
    for compute in ("fp32", "fp16"):
        for weights in ("channel", "factored"):
            settings = export.ExportSettings(20, compute, weights)  # type: ignore[arg-type]
            yield f"{compute} {weights}", export.finish_graph(traced, quantized.plan, settings)


def _linear(graph: onnx.ModelProto, *parts: str) -> str | None:
    """Return the second linear of the first part that it has: nothing of it is the same in every token."""
    end, names = ".weight_int8", [t.name for t in graph.graph.initializer][::-1]
    found = (name for part in parts for name in names if name.endswith(part + end))
    return next((name.removesuffix(end) for name in found), None)


def _store(graph: onnx.ModelProto, names: list[str], change: Callable[[Any], Any]) -> bool:
    for name in names:
        store(graph, name, change(tensor(graph, name)))
    return bool(names)


def _vector(suffix: str, change: Callable[[Any], Any], *parts: str) -> Fault:
    def fault(graph: onnx.ModelProto) -> bool:
        name = f"{_linear(graph, *parts)}.{suffix}"
        names = [t.name for t in graph.graph.initializer if t.name in (name, f"{name}_fp16") and t.dims]
        return _store(graph, names, lambda value: change(value.astype(np.float32)))

    return fault


def _swapped(graph: onnx.ModelProto) -> bool:
    query, key = _linear(graph, "query"), _linear(graph, "key")
    if query is None or key is None:
        return False
    for name in [t.name for t in graph.graph.initializer if t.name.startswith(f"{query}.weight")]:
        other = f"{key}{name.removeprefix(query)}"
        first, second = tensor(graph, name), tensor(graph, other)
        store(graph, name, second)
        store(graph, other, first)
    return True


def _transposed(graph: onnx.ModelProto) -> bool:
    name = _linear(graph, "query", "q_lin")
    return _store(graph, [f"{name}.weight_int8"] if name else [], lambda value: value.T.copy())


def _wrong_axis(graph: onnx.ModelProto) -> bool:
    name = _linear(graph, "attention.output.dense", "out_lin")
    for node in graph.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] == f"{name}.weight_int8" and node.attribute:
            axis = next(item for item in node.attribute if item.name == "axis")
            axis.i = 1 - attribute(node, "axis", 1)
            return tensor(graph, node.input[1]).ndim == 1
    return False


def _stale_amax(kind: str) -> Fault:
    def fault(graph: onnx.ModelProto) -> bool:
        """The scale of a Q and its DQ is of another calibration."""
        nodes = [node for node in graph.graph.node if node.op_type == "QuantizeLinear"]
        names = [node.input[1] for node in nodes if module_of(node.name).endswith(kind)]
        return _store(graph, names[-1:], lambda value: value * np.float32(0.8))

    return fault


def _positions(graph: onnx.ModelProto) -> bool:
    names = [t.name for t in graph.graph.initializer if "position_embeddings.weight" in t.name]
    return _store(graph, names, lambda value: np.roll(value, 1, 0))


def _mask(graph: onnx.ModelProto) -> bool:
    scalars = [t.name for t in graph.graph.initializer if t.data_type in (1, 10) and not t.dims]
    return _store(graph, [name for name in scalars if tensor(graph, name) <= MASK_FILL], np.zeros_like)


def _shift(graph: onnx.ModelProto) -> bool:
    """The bias of a LayerNorm, which holds what was shifted out of a tensor, is missing."""
    names = [t.name for t in graph.graph.initializer if re.search("(LayerNorm|layer_norm).bias", t.name)]
    return _store(graph, names[-2:-1], np.zeros_like)


def _first(value: Any) -> Any:
    return np.arange(len(value)) == 0


FAULTS: dict[str, Fault] = {
    "wrong scale of a weight": _vector("weight_scale", lambda value: value * 1.25, "dense"),
    "wrong scale of one channel": _vector(
        "weight_scale", lambda value: value * (1 + _first(value) / 2), "dense"
    ),
    "wrong axis": _wrong_axis,
    "swapped q and k": _swapped,
    "transposed weight": _transposed,
    # every second channel: a LayerNorm takes out what all share
    "one bias off": _vector(
        "bias", lambda value: value + np.float32(0.1) * (np.arange(len(value)) % 2 == 0), "dense", "lin1"
    ),
    "bias of one channel off": _vector("bias", lambda value: value + _first(value) / 2, "dense", "lin1"),
    "missing shift": _shift,
    "stale amax of an input": _stale_amax("input_quantizer"),
    "stale amax of a value": _stale_amax("v_bmm_quantizer"),
    "positions off by one": _positions,
    "wrong mask": _mask,
}


def repeated(share: float) -> Callable[[Any, Any], Any]:
    """Return what draws one sample for a share of the places."""
    return lambda order, _: np.where(np.arange(len(order)) < share * len(order), order[0], order)


# of shuffled samples and the classes of all: those that are evaluated
ODD: dict[str, Callable[[Any, Any], Any]] = {
    "5% repeated": repeated(0.05),
    "20% repeated": repeated(0.2),
    "all repeated": repeated(1),
    "1 row": lambda order, _: order[:1],
    "2 rows": lambda order, _: order[:2],
    "10 rows": lambda order, _: order[:10],
    "one class": lambda order, gold: order[gold[order] == gold[order[0]]],
    "long tail": lambda order, _: order,  # the lengths of all samples have one
}
SAMPLES, PER_BATCH, LONGEST = 384, 32, 120


def judged_draws(count: int, families: list[str], run: Path | None) -> bool:
    """Judge answers of healthy graphs on draws of odd texts, and print the rate of false alarms."""
    failed = dict.fromkeys(ODD, 0)
    done = dict.fromkeys(ODD, 0)
    cases = [(family, recipe) for family in families for recipe in recipes_of(family)[:2]]
    cases = cases if run is None else [("engine", load_recipe(str(run / "recipe.yaml")))]
    for place, (family, recipe) in enumerate(cases):
        answers = _answers_of(family, recipe, seed=place) if run is None else _answers_of_run(run)
        for draw in range(place, count, len(cases)):
            kind = [*ODD][draw // len(cases) % len(ODD)]
            done[kind] += 1
            if not _holds(answers, ODD[kind], recipe.gate.max_drop, seed=draw):
                failed[kind] += 1
                print(f"FALSE ALARM: {kind} in {family} {recipe.name} draw {draw}", flush=True)
    print("\n| | rate |\n|---|---|")
    for kind, times in done.items():
        print(f"| false alarms: {kind} | {interval(failed[kind], times) if times else 'not drawn'} |")
    print(f"| false alarms: all | {interval(sum(failed.values()), count)} |")
    return not any(failed.values())


def _answers_of_run(run: Path) -> Any:
    """Return answers of a run's engine, its fake-quant model and FP32, as `_answers_of` but of one order."""
    from qdqbench.eval.verification import engine
    from qdqbench.quantize.engine.runtime.runners import open_runner
    from qdqbench.quantize.engine.sidecar import check_sidecar
    from qdqbench.quantize.pipeline.graphs import graph_path
    from qdqbench.quantize.pipeline.ownership import open_session

    engine.SAMPLES = sys.maxsize
    with open_session(run) as session:
        path, graph = run / "engine" / "model.int8.engine", graph_path(session)
        profiles, outputs = check_sidecar(path, graph).profiles, session.config.task.kind.outputs
        with open_runner(path, graph, pad_id=session.pad_id, outputs=outputs) as runner:
            data = engine._read_data(session, engine.widest(profiles).max[1])
            got = engine._run_rows(runner, data, profiles, session)
    return np.stack([[part, part] for part in (got, data.reference[data.rows], data.fp32[data.rows])])


def _answers_of(family: str, recipe: Recipe, seed: int) -> Any:
    """Return answers [2, samples, 2] of graph and fake-quant model in two orders of batches, and of FP32."""
    from qdqbench.eval.metrics.runners import session_of
    from qdqbench.quantize.models.load import load_model

    random = np.random.default_rng(seed)
    lengths = np.clip(random.pareto(1.5, SAMPLES) * 4 + 3, 3, LONGEST).astype(int)
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(Path(place) / "model", family, seed=seed)
        plain, quantized = load_model(str(folder)), calibrate(folder, recipe)
    settings = export.ExportSettings(20, "fp32", "channel", for_gpu=False)
    graph = export.finish_graph(export.trace(quantized.model, 20), quantized.plan, settings)
    pad = quantized.model.config.pad_token_id
    tokens = [padded_batch((int(length),), seed + n)["input_ids"][0] for n, length in enumerate(lengths)]
    session = session_of(graph.SerializeToString(), "a healthy graph")
    names = [each.name for each in graph.graph.input]
    found = np.zeros((3, 2, SAMPLES, 2), np.float32)
    for time_, order in enumerate((np.arange(SAMPLES), random.permutation(SAMPLES))):
        for rows in np.split(order, SAMPLES // PER_BATCH):
            length = max(len(tokens[row]) for row in rows)
            ids = np.stack(
                [np.pad(tokens[row], (0, length - len(tokens[row])), constant_values=pad) for row in rows]
            )
            mask = (np.arange(length) < lengths[rows][:, None]).astype(np.int64)
            given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            batch = {name: given[name] for name in names}
            found[0, time_, rows] = session.run(None, batch)[0]
            for model, into in ((quantized.model, 1), (plain, 2)):
                with torch.inference_mode():
                    logits = model(**{name: torch.from_numpy(value) for name, value in batch.items()}).logits
                found[into, time_, rows] = logits.numpy()
    return found


def _holds(answers: Any, drawn: Callable[[Any, Any], Any], max_drop: float, seed: int) -> bool:
    from qdqbench.eval.verification import checks
    from qdqbench.quantize.tasks.task import get_task

    random = np.random.default_rng(seed)
    got, reference, fp32 = answers
    gold = fp32[0].argmax(axis=1)
    gold = np.where(random.random(len(gold)) < 0.1, 1 - gold, gold)
    rows = np.unique(drawn(random.permutation(len(gold)), gold))  # verification takes equal texts once
    times = random.integers(2, size=(2, len(rows)))  # in which batch each of both computed it
    parts = got[times[0], rows], reference[times[1], rows], fp32[0, rows]
    found = checks.check_answers(
        get_task("sst2"), *parts, gold[rows], samples=np.arange(len(rows)),
        cost=checks.QuantizationCost.of(parts[1], parts[2], len(rows)), max_drop=max_drop, seed=seed,
    )  # fmt: skip
    return found.holds


def write_odd(folder: Path, model: Path, kind: str, seed: int) -> None:
    """Write the evaluated split of sst2 anew, of texts of a kind; a tenth of the labels are not a model's."""
    from tests.integration.tiny import EVAL_ROWS, NOISE, rows, write_split
    from transformers import AutoTokenizer

    from qdqbench.quantize.models.inputs import select_inputs
    from qdqbench.quantize.models.load import load_model

    random, table = np.random.default_rng(seed), rows("sst2", EVAL_ROWS, 100 + seed)
    if kind == "long tail":
        lengths = np.clip(random.pareto(1.5, EVAL_ROWS) * 4 + 3, 3, LONGEST).astype(int)
        words = [text.split() * LONGEST for text in table["sentence"]]
        table["sentence"] = [" ".join(each[:n]) for each, n in zip(words, lengths, strict=True)]
    loaded = load_model(str(model))
    given = AutoTokenizer.from_pretrained(model)(table["sentence"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        said = loaded(**select_inputs(loaded, given)).logits.argmax(1)
    labels = np.where(random.random(EVAL_ROWS) < NOISE, 1 - said.numpy(), said.numpy())
    drawn, table["label"] = ODD[kind](random.permutation(EVAL_ROWS), labels), labels.tolist()
    table = {name: [values[row] for row in drawn] for name, values in table.items()}
    write_split(folder / "sst2" / "validation.parquet", table)


def interval(count: int, of: int) -> str:
    """Return a rate with its exact (Clopper-Pearson) 95 % interval."""
    from scipy import stats

    found = stats.binomtest(count, of).proportion_ci(0.95, "exact")
    return f"{count} of {of} ({count / of:.1%}, 95% CI {found.low:.1%} to {found.high:.1%})"


def failing(parity: Parity) -> list[str]:
    """Return the rows that do not hold, with their figures."""
    return [
        f"{row.name}: {row.differing - row.at_border} of {row.int8_values} ({row.differing} with borders), "
        f"step {row.max_step}, output {row.output_rel_error}"
        for row in parity.compared
        if not row.holds
    ]


def nearest(results: Any) -> tuple[float, str]:
    """Return the largest share of its limit that a block's error has, and which error it is."""
    found = [(0.0, "")]
    for row in results.verification.blocks if results.verification else ():
        found += [
            (error / limit, f"{kind} of {row.name}")
            for kind, error, limit in (
                ("error", row.error, row.limit),
                ("position", row.position_error, row.position_limit),
                ("systematic", row.systematic_error, row.systematic_limit),
            )
            if error is not None
        ]
    return max(found)


def catches(run: Path, name: str) -> bool | None:
    """Return whether verification fails for an engine of a broken graph; None: nothing to break."""
    from qdqbench.eval.stages.stages import build_stage
    from qdqbench.eval.verification.engine import verify_engine
    from qdqbench.quantize.pipeline.graphs import graph_path
    from qdqbench.quantize.pipeline.ownership import open_session
    from qdqbench.quantize.utils.errors import UserError

    with open_session(run) as session:
        path = graph_path(session)
        broken = onnx.load(path)
        if not FAULTS[name](broken):
            return None
        path.write_bytes(broken.SerializeToString())
        try:
            build_stage(session)
        except UserError:  # the runtime refuses the graph
            return True
        return not verify_engine(session).passed


def whole_runs(count: int, families: list[str], backends: list[str], faults: int, *, odd: bool) -> bool:
    """Run the main job on tiny models and engines for CPUs, and plant faults into the first runs."""
    from tests.integration.tiny import entries, write_data

    import qdqbench

    failures: dict[str, int] = dict.fromkeys(("parity", "verification", "gate"), 0)
    caught: dict[str, list[bool]] = {name: [] for name in FAULTS}
    of_kind = {kind: [0, 0] for kind in ODD} if odd else {}  # runs that fail, and all
    closest, pool = (0.0, ""), ProcessPoolExecutor(1, get_context("spawn"))
    cases = [
        (family, recipe, backend, seed)
        for seed in range(count)
        for backend in backends
        for family in families
        for recipe in recipes_of(family)[seed % 2 :: 2]
        if "residual" not in recipe.name
    ]
    for done, (family, recipe, backend, seed) in enumerate(cases[:count]):
        with tempfile.TemporaryDirectory() as place:
            folder, name = Path(place), f"{family} {recipe.name} {backend} seed {seed}"
            write_data(folder / "data", "sst2")
            model = write_model(folder / "model", family, entries(), seed=seed)
            if odd:
                texts = [*ODD][done % len(ODD)]
                name = f"{name} {texts}"
                write_odd(folder / "data", model, texts, done)
            text = recipe.model_dump(mode="json")
            text["calibration"]["samples"], text["engine"]["backend"] = 64, backend
            options = {"out": folder / "run", "seed": seed}
            results = qdqbench.run(Recipe.model_validate(text), model, "sst2", folder / "data", **options)
            found = {
                "parity": results.parity is None or not results.parity.passed,
                "verification": results.verification is None or not results.verification.passed,
                "gate": results.gate.state == "failed",
            }
            failures = {kind: failures[kind] + failed for kind, failed in found.items()}
            if odd:
                of_kind[texts] = [of_kind[texts][0] + any(found.values()), of_kind[texts][1] + 1]
            share, what = nearest(results)
            closest = max(closest, (share, f"{what}, {name}"))
            print(f"{name}: {share:.0%} of its limit, {what}", flush=True)
            if any(found.values()):
                print(f"FALSE ALARM: {name}: {results.gate.failures}", flush=True)
            graphs = {path: path.read_bytes() for path in (folder / "run").glob("model.*.onnx")}
            for kind in FAULTS if done < faults else ():
                try:
                    seen = pool.submit(catches, folder / "run", kind).result()
                except BrokenProcessPool:  # the runtime crashed on a graph that the stage `check` refuses
                    seen, pool = True, ProcessPoolExecutor(1, get_context("spawn"))
                for path, healthy in graphs.items():  # a crash leaves the broken one
                    path.write_bytes(healthy)
                if seen is not None:
                    caught[kind].append(seen)
                    if not seen:
                        print(f"MISSED: {kind} in {name}", flush=True)
    pool.shutdown()
    print(f"nearest to its limit: {closest[0]:.0%}, {closest[1]}\n\n| | rate |\n|---|---|")
    for kind, failed in failures.items():
        print(f"| whole runs that fail: {kind} | {interval(failed, len(cases[:count]))} |")
    for texts, (failed, times) in of_kind.items():
        print(f"| whole runs that fail: {texts} | {interval(failed, times) if times else 'none'} |")
    print_caught(caught)
    return not any(failures.values()) and (not faults or catches_all(caught))


def catches_all(caught: dict[str, list[bool]]) -> bool:
    """Return whether every fault was planted, and caught each time."""
    return all(found and all(found) for found in caught.values())


def print_caught(caught: dict[str, list[bool]]) -> None:
    """Print a row for each planted fault, and one for all."""
    planted = [each for found in caught.values() for each in found]
    for name, found in caught.items():
        print(f"| caught: {name} | {interval(sum(found), len(found)) if found else 'not planted'} |")
    if planted:
        print(f"| caught: all | {interval(sum(planted), len(planted))} |", flush=True)


def main() -> None:
    """Run all and print the table of docs/explanation/the-graph.md."""
    warnings.simplefilter("ignore")
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--seeds", type=int, default=2)
    asked.add_argument("--families", default=",".join(SIZES))
    asked.add_argument("--backends", default="openvino,onnxruntime", help="of --runs")
    asked.add_argument("--runs", type=int, default=0)
    asked.add_argument("--faults", type=int, default=20)
    asked.add_argument("--odd", action="store_true", help="texts of --runs, which then plants no faults")
    asked.add_argument("--draws", type=int, default=0)
    asked.add_argument("--of", type=Path, help="run whose engine answers the texts of --draws")
    options = asked.parse_args()
    if options.draws:
        sys.exit(not judged_draws(options.draws, options.families.split(","), options.of))
    if options.runs:
        families, backends = options.families.split(","), options.backends.split(",")
        faults = 0 if options.odd else options.faults
        sys.exit(not whole_runs(options.runs, families, backends, faults, odd=options.odd))
    healthy: list[bool] = []
    caught: dict[str, list[bool]] = {name: [] for name in FAULTS}
    worst, start = 0.0, time.monotonic()
    for family in options.families.split(","):
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as place:
                folder = write_model(Path(place) / "model", family, labels=1 + seed % 3, seed=seed)
                on_border = seed % 2 == 1 and family in BERT_NAMES
                if on_border:
                    hold_channels(folder)
                for recipe in recipes_of(family):
                    quantized = calibrate(folder, recipe)
                    moved = put_on_borders(quantized.model) if on_border else 0
                    data = batches(seed, quantized.model.config.pad_token_id)
                    for form, graph in graphs(quantized, recipe):
                        parity = compare_layers(graph, quantized.model, data)
                        healthy.append(parity.passed)
                        worst = max(
                            [worst, *((r.differing - r.at_border) / r.int8_values for r in parity.rows)]
                        )
                        what = f"{family} seed {seed} {recipe.name} {form}, {moved} channels on borders"
                        if not parity.passed:
                            print(f"FALSE ALARM: {what}", *failing(parity), sep="\n  ", flush=True)
                        if seed or form not in ("fp32 channel", "fp16 factored"):
                            continue
                        for name, fault in FAULTS.items():
                            broken = copied(graph)
                            if fault(broken):
                                caught[name].append(not compare_layers(broken, quantized.model, data).passed)
                                if not caught[name][-1]:
                                    print(f"MISSED: {name} in {what}", flush=True)
        print(f"{family}: {len(healthy)} healthy graphs, {time.monotonic() - start:.0f} s", flush=True)
    print(f"largest share of codes beyond rounding in a healthy tensor: {worst:.3%}")
    print("\n| | rate |\n|---|---|")
    print(f"| false alarms | {interval(healthy.count(False), len(healthy))} |")
    print_caught(caught)
    sys.exit(not (all(healthy) and catches_all(caught)))


if __name__ == "__main__":
    main()
