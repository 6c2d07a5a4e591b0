"""Figures of the documents, and `recipes/figures.json`, from the results files in `docs/measured`.

    python tools/tables.py                  write every figure of the pages, the CSV files and figures.json
    python tools/tables.py --check          change nothing; exit status 2 where something would change
    python tools/tables.py --add RUNS ...   take results from folders of finished runs and benches, then write

A page holds a figure between `<!-- figures:NAME -->` and `<!-- figures:end -->`; NAME is a key of `FIGURES`.
The same files give the same bytes, in any order. `--add` keeps of a run what figures read, and replaces an
older result of the same measurement.
"""

import argparse
import csv
import io
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from qdqbench.eval.bench.results import (
    BENCH_FILE,
    Bench,
    BenchConfig,
    Speedup,
    cost_of,
    over_fastest,
    read_bench,
    row_of,
    speedup_between,
    speedup_of,
)
from qdqbench.eval.metrics import figures
from qdqbench.eval.runs.results import RESULTS_FILE, STAGES, Results, read_results
from qdqbench.quantize.models.families.known import FAMILIES, family_named
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.recipe import shipped
from qdqbench.quantize.recipe.plan import match_modules
from qdqbench.quantize.recipe.schema import Recipe, adapt_recipe, load_recipe, shipped_recipes
from qdqbench.quantize.recipe.sections import AUTO
from qdqbench.quantize.recipe.shipped import Accuracy, Figure, Speed
from qdqbench.quantize.report.formats import clean, cleaned, code, flat, in_points, label, model_label
from qdqbench.quantize.tasks.kinds.embedding import PAIRS
from qdqbench.quantize.tasks.task import EMBED, GLUE
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import SECOND

ROOT = Path(__file__).resolve().parents[1]
MEASURED = "docs/measured"
RUNS, BENCHES = "runs", "benches"  # folders there
CALIBRATION = "calibration.json"  # there: when calibration last changed; accuracy from before it is no more
TIMED_SINCE = "2026-11-30T02:00"  # since when `cuda` has its kernels; speed from before it is no more
FIGURES_FILE = "recipes/figures.json"
BEGIN, END = "<!-- figures:{} -->", "<!-- figures:end -->"
SQUAD = "squad-lengths"  # in the path of made-up rows
UNPADDED = "unpadded-fp16"  # a system of a bench
SMOOTHING, CENTERING = "calibration.smoothing", "calibration.centering"
SQNR_STEP = 5  # dB of a row
ATTENTION, FUSED, LINEARS = "int8-attention", "int8-residual-fused", "int8-linears"
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
TRAINED = "bert-base-fourth"  # a training
MPNET = "mpnet-second"  # trained as TRAINED; its embedder is not trained
IN_TENSORRT = {  # models in TensorRT-RTX, with names of their trainings
    "MiniLM-L6": ("minilm-l6", "minilm-l6-third", "minilm-l6-fourth"),
    "BERT-base": [
        f"bert-base-{name}" for name in ("fifth", "fifth-embed", "sixth", "seventh", "seventh-embed")
    ],
    "MPNet": ("mpnet-fourth", "mpnet-fifth", "mpnet"),
}


class Record(dict[str, Any]):
    """A JSON object whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@dataclass(frozen=True)
class Data:
    """All results: of runs, and of benches."""

    runs: Sequence[Record]
    benches: Sequence[Bench]

    @cached_property
    def lowest(self) -> "dict[Timed, Speedup]":
        """The lowest speed-up that benches of one shape measured: the one figure of it everywhere."""
        found: dict[Timed, Speedup] = {}
        for bench in self.benches:
            largest = max((cell.batch for cell in bench.configs if cell.length is None), default=0)
            for recipe, backend, cell, best in timed(bench):
                if cell.length is None and cell.batch < largest:
                    continue  # of a data set, the throughput
                shape = cell.batch, cell.length or label(bench.settings.dataset or "")
                key = _device(bench), bench.target.name, recipe.partition("-")[2], backend, *shape
                found[key] = min(found.get(key, best), best, key=lambda each: each.value)
        return found

    @cached_property
    def figures(self) -> list[Figure]:
        return figures_of(self.runs, [bench for bench in self.benches if bench.settings.threads != 1])


def _keep(names: str, **inner: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split()) | inner


VERSUS = _keep("n delta delta_stderr disagreements sqnr_db sqnr_db_stderr sqnr_output")
KEPT = _keep(  # what figures read of a run: None is all of a value, "*" every key of an object
    "created command recipe model task seed trained environment",
    stages={"*": _keep("status n metrics stderr", vs_fp32=VERSUS)},
    training=_keep("best_step steps seconds learning_rate"),
    reconstruction=_keep("rows held_out before_db after_db seconds", layers=_keep("before_db after_db")),
    engine=_keep(
        "backend version compute_capability int8_gemms expected_int8_gemms attention_int8 "
        "expected_attention_int8 int8_residuals expected_int8_residuals"
    ),
    gate=_keep("state"),
)


def _project(value: Any, kept: dict[str, Any] | None) -> Any:
    if isinstance(value, list):
        return [_project(item, kept) for item in value]
    if not isinstance(value, dict):
        return value
    if kept is None or "*" in kept:
        return Record({key: _project(item, kept and kept["*"]) for key, item in value.items()})
    return Record({key: _project(value[key], inner) for key, inner in kept.items() if key in value})


def run_of(results: Results) -> Record:
    derived: dict[str, Any] = {"trained": results.trained, "gate": {"state": results.gate.state}}
    if results.training:
        derived["training"] = results.training.model_dump(mode="json")
    name = str(results.recipe["name"])
    if results.reconstruction and not name.endswith("-qat"):  # no shipped recipe has it
        name += "-reconstructed" + "-qat" * bool(results.training)
        derived["recipe"] = results.recipe | {"name": name}
    if results.task.get("type") == PAIRS.name:  # STS-B by an embedder is another task than by a regressor
        derived["task"] = results.task | {"name": EMBED.name}
    return _record(results.model_dump(mode="json") | derived)


def _record(value: dict[str, Any]) -> Record:
    record: Record = _project(clean(value), KEPT)
    return record


def _bench(bench: Bench) -> Bench:
    """Return a bench with the right name of rows that `measure_tables.py` made up in the layout of SST-2."""
    if SQUAD not in bench.command:
        return bench
    return bench.model_copy(update={"settings": bench.settings.model_copy(update={"dataset": "SQuAD-like"})})


def read_record(path: Path) -> Any:
    if path.name == RESULTS_FILE:
        return run_of(read_results(path.parent))
    if path.name == BENCH_FILE or path.parent.name == BENCHES:
        return _bench(cleaned(read_bench(path)))
    return _record(files.read_json(path))


def read_data(folder: Path) -> Data:
    """Read the runs and benches of `docs/measured`, in an order of their contents."""
    paths = [folder / "report" / RESULTS_FILE, *(folder / RUNS).glob("*"), *(folder / BENCHES).glob("*")]
    found: dict[tuple[Any, ...], tuple[Path, Any]] = {}
    for path in filter(Path.is_file, paths):
        record = read_record(path)
        key = measurement(record)
        if key in found:
            raise UserError(f"{found[key][0]} and {path} measured the same thing; keep only one of them")
        found[key] = path, record
    records = [found[key][1] for key in sorted(found)]
    changed = files.read_json(ROOT / MEASURED / CALIBRATION)
    old = [
        path.name
        for path, record in found.values()
        if not isinstance(record, Bench) and record.created < _last_change(record, changed)
    ]
    if old:
        raise UserError(
            f"calibration has changed since {', '.join(sorted(old))}; measure again, or delete them"
        )
    runs = [record for record in records if not isinstance(record, Bench)]
    return Data(runs, [record for record in records if isinstance(record, Bench)])


def _last_change(run: Record, changed: dict[str, Any]) -> str:
    """Return when calibration last changed for the recipe and backend of a run."""
    backend = str(run.engine.backend) if run.engine else "onnxruntime"
    kinds = changed[backend.removesuffix("_rtx")]  # one calibration for TensorRT and TensorRT-RTX
    name = str(run.recipe.get("name")).partition("int8-")[2]
    kind = max((kind for kind in kinds if name.startswith(kind)), key=len, default=None)
    return str(kinds[kind]["since"] if kind else max(each["since"] for each in kinds.values()))


def measurement(record: Any) -> tuple[Any, ...]:
    """Return what was measured on what, which no two results share."""
    if isinstance(record, Bench):
        chosen = record.settings
        shapes = chosen.engine_shapes, tuple(chosen.lengths), tuple(chosen.batches), str(chosen.dataset)
        recipe, backend = str(record.recipe.get("name")), str(record.systems[0].backend).partition(" ")[0]
        others = tuple(sorted(each.recipe["name"] for each in record.systems if each.recipe))
        return "bench", record.device, record.target.name, recipe, others, backend, _device(record), *shapes
    recipe = str(record.recipe.get("name"))
    of = recipe, _model_name(record), record.task.name
    return "run", *of, record.seed, _where(record)


def add(folder: Path, measured: Path) -> Iterator[Path]:
    """Copy the results below a folder into `docs/measured`; yields what was written.

    A file is named after the folder of its result. An older one of the same measurement goes.
    """
    paths = [path for name in (RESULTS_FILE, BENCH_FILE) for path in sorted(folder.rglob(name))]
    if not paths:
        raise UserError(f"{folder} holds no {RESULTS_FILE} or {BENCH_FILE}; name folders of finished runs")
    there = {measurement(read_record(path)): path for name in (RUNS, BENCHES)
             for path in (measured / name).glob("*.json")}  # fmt: skip
    for path in paths:
        record = read_record(path)
        if old := there.get(measurement(record)):
            old.unlink()
        kind = BENCHES if isinstance(record, Bench) else RUNS
        target = measured / kind / f"{path.parent.name}.json"
        text = path.read_text(encoding="utf-8") if kind == BENCHES else json.dumps(record, indent=1) + "\n"
        files.write_text(target, text)
        yield target


# Recipes that changed since


def differences(recipe: dict[str, Any], *, timed: bool = False) -> list[str]:
    """Return the settings of a recorded recipe that the shipped one has otherwise, but for what runs get.

    `timed` leaves out another degree of smoothing, and centering: they change values of an engine, not its
    kernels. Without it the shapes are left out: accuracy is of any kernels.
    """
    name = str(recipe.get("name"))
    if name not in shipped_recipes():
        return []
    try:
        then = _settings(Recipe.model_validate(recipe))
    except ValidationError:
        return ["it is of another version of qdqbench"]
    shipped_one, engine = load_recipe(name), recipe.get("engine", {})
    length, backend = recipe.get("export", {}).get("max_length"), engine.get("backend")
    now_shipped = adapt_recipe(
        shipped_one,
        max_length=None if length == shipped_one.export.max_length else length,
        backend=None if backend == shipped_one.engine.backend else backend,
        shapes=AUTO if engine.get("shapes") == AUTO else None,
    )
    now = _settings(now_shipped if recipe.get("qat") else now_shipped.ptq)
    written = _settings(shipped_one)["engine.shapes"]
    if then["engine.shapes"] == written:  # `--set export.max_length` leaves them; `--max-length` does not
        now["engine.shapes"] = written
    return [
        f"{key} {then.get(key)} (now {now.get(key)})"
        for key in dict.fromkeys((*then, *now))
        if then.get(key) != now.get(key)
        and key.split(".")[0] not in ("description", "gate")
        and not (timed and key == SMOOTHING and "none" not in (then.get(key), now.get(key)))
        and key != (CENTERING if timed else "engine.shapes")
    ]


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's settings, with what its rules do to each linear: older results have no roles."""
    family = family_named(recipe.model.family)
    linears = {f"{family.layers}.0.{path}": ModuleInfo("Linear") for path in family.linears}
    backend = recipe.engine.backend
    gelu = "tanh" if recipe.computes_tanh_on(backend) else "exact"
    meant = {"calibration": recipe.calibration_for(backend)}
    recipe = recipe.model_copy(update=meant | {"export": recipe.export.model_copy(update={"gelu": gelu})})
    rules: dict[str, dict[str, Any]] = {}
    for rule in recipe.rules:
        fields = rule.model_dump(mode="json", exclude_none=True, exclude={"match", "role", "type"})
        for name in match_modules(rule, linears, family) or [rule.target]:
            rules[name] = rules.get(name, {}) | fields
    return dict(flat(recipe.model_dump(mode="json") | {"rules": [*rules.items()]}))


# What runs and benches say


def _model_name(run: Record) -> str:
    return Path(run.model.name).name


def _metric(run: Record) -> str:
    return str(run.task.metrics[0])


def _short(recipe: Mapping[str, Any]) -> str:
    """Return the name of a recipe without its family."""
    return str(recipe["name"]).partition("-")[2]


def _last(run: Record, stages: Sequence[str]) -> str | None:
    return next((name for name in stages if name in run.stages and run.stages[name].vs_fp32), None)


def _hardware(environment: dict[str, Any], *, on_cpu: bool) -> str:
    if on_cpu:
        return f"{environment.get('cpu')}, {environment.get('cores')} cores"
    return str(environment.get("gpu"))


def _device(bench: Bench) -> str:
    return _hardware(bench.environment, on_cpu=bench.device == "cpu")


def _where(run: Record) -> str:
    """Return the hardware and the library that ran the last stage."""
    ran = run.engine if _last(run, ("engine",)) else None
    where = _hardware(run.environment, on_cpu=ran is None or ran.backend in CPU_BACKENDS)
    return where if ran is None else f"{where}, {_backend(ran.backend, ran.version)}"


def _backend(name: str, version: str) -> str:
    return f"{label(name)} {version.partition('-')[0]}"


def _task_order(task: str) -> tuple[int, str]:
    order = ["sst2", "mrpc", "stsb", *GLUE]
    return (order.index(task) if task in order else len(order), task)


def timed(bench: Bench) -> Iterator[tuple[str, str, BenchConfig, Speedup]]:
    """Yield recipe, backend, shape and speed-up over the fastest FP16 of each INT8 engine of a bench.

    A recipe that is shipped otherwise now has other kernels, and is left out; so are former ones of `cuda`.
    """
    own = str(bench.recipe.get("name"))
    for system in bench.systems:
        recipe = system.recipe or bench.recipe
        if system.precision != "int8" or differences(recipe, timed=True):
            continue
        name, backend = str(recipe.get("name", own)), system.backend.split()[0]
        if _is_former(bench, backend):
            continue
        others = [each for each in bench.systems if each.precision != "fp8"]
        for cell in bench.configs:
            if best := over_fastest(others, cell, system.name):
                yield name, backend, cell, best


def _is_former(bench: Bench, backend: str = "cuda") -> bool:
    """Return whether `cuda` had other kernels."""
    return backend == "cuda" and bench.created < TIMED_SINCE


Timed = tuple[str, str, str, str, int, int | str]  # device, model, recipe, backend, batch, tokens or data set


def speed_of(data: Data, *key: Any) -> Speedup | None:
    """Return the speed-up over the fastest FP16 of a device, model, recipe, backend, batch and tokens."""
    return data.lowest.get(key)  # type: ignore[call-overload, no-any-return]


def _ratio(speed: Speedup | None, *, interval: bool = False) -> str:
    if speed is None:
        return ""
    cell = figures.speed(speed)
    verdict = "" if speed.verdict == "faster" else f", {speed.verdict}"
    shown = cell.text if interval else f"{speed.value:.2f}x{verdict}"
    return f"**{shown}**" if cell.state == "bad" else shown


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, unpadded so that a new figure changes one line; cells are Markdown already."""
    lines = [f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows]]
    return "\n".join(["\n", *lines, "\n"])


def _filled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of the columns that have something in a row."""
    used = [any(row[place] for row in rows) for place in range(len(header))]
    return table([*compress(header, used)], [[*compress(row, used)] for row in rows])


# Figures of pages: each is a table, or words within a sentence


def _find(data: Data, model: str, task: str, recipe: str, backend: str) -> Record | None:
    """Return the run of a model, a task, a recipe without its family and a backend, of seed 0."""
    for run in data.runs:
        named = _model_name(run) in (model, f"{model}-{task}"), run.task.name == task, run.seed == 0
        engine = run.engine.backend if run.engine else ""
        if all(named) and (_short(run.recipe), engine) == (recipe, backend):
            return run
    return None


def _loss(run: Record | None, metric: str | None = None) -> str:
    """Return what an engine gained, or lost, against FP32: in points, with its paired error."""
    if run is None or _last(run, ("engine",)) is None:
        return ""
    versus, metric = run.stages.engine.vs_fp32, metric or _metric(run)
    return in_points(versus.delta[metric] + 0.0, versus.delta_stderr.get(metric), "+")


def _score(run: Record | None, stage: str, metric: str | None = None) -> str:
    row = run and run.stages.get(stage)
    return "" if not run or not row or not row.metrics else f"{row.metrics[metric or _metric(run)]:.4f}"


def _mean(runs: Sequence[Record]) -> str:
    """Return the mean difference of engines from FP32 over tasks, with the error of the paired errors."""
    pairs = [(run.stages.engine.vs_fp32, _metric(run)) for run in runs]
    error = math.hypot(*(versus.delta_stderr.get(metric) or 0.0 for versus, metric in pairs)) / len(pairs)
    return in_points(fmean(versus.delta[metric] for versus, metric in pairs) + 0.0, error, "+")


def _task(name: str) -> str:
    return "STS-B by cosine" if name == EMBED.name else label(name)


def speed_table(data: Data) -> str:
    """BERT-base on one H200, by backend."""
    shapes = [(1, 128), (8, 128), (32, 128), (128, 128), (32, 384)]
    header = ["BERT-base, batch x tokens", *(f"{batch} x {length}" for batch, length in shapes)]
    rows = [
        [
            f"{label(backend)}, {code(recipe)}",
            *(_ratio(speed_of(data, H200, "bert-base", recipe, backend, *shape)) for shape in shapes),
        ]
        for backend, recipe in (("cuda", ATTENTION), ("cuda", FUSED), ("tensorrt_rtx", FUSED))
    ]
    return table(header, rows)


def _by_gpu(data: Data, kind: type, title: str) -> str:
    columns = [(gpu, backend) for gpu in (H200, H100) for backend in ("cuda", "tensorrt_rtx")]
    keys = [key for key in data.lowest if key[0] in (H200, H100) and key[2] == FUSED and type(key[5]) is kind]
    order = sorted(keys, key=lambda key: (key[1], str(key[5]).zfill(4), key[4]))
    rows = []
    for model, batch, tokens in dict.fromkeys((key[1], *key[4:]) for key in order):
        cells = [speed_of(data, gpu, model, FUSED, backend, batch, tokens) for gpu, backend in columns]
        rows.append([model, f"{batch} x {tokens}", *map(_ratio, cells)])
    names = ["model", title, *(f"{gpu.split()[1]}, {label(backend)}" for gpu, backend in columns)]
    return _filled(names, rows)


FP16 = "fastest FP16"  # of a cell
LEAST = 128  # tokens of a row in the tables beside FP8


def _beside_others(data: Data, own: str, *others: tuple[str, str]) -> str:
    """Of several benches of a shape the one with the lowest ratio counts, as everywhere."""
    found: dict[str, tuple[float, list[str]]] = {}
    for bench, cell in ((each, cell) for each in data.benches for cell in each.configs):
        half = [each for each in bench.systems if each.precision not in ("int8", "fp8")]
        best = over_fastest([*half, *(each for each in bench.systems if each.name == own)], cell, own)
        names = (best.baseline if best and name == FP16 else name for name, _ in others)
        timed = [row_of(cell, name) for name in (own, *names)]
        ready = all(row is not None and row.median_ms is not None for row in timed)
        if ready and (cell.length or 0) >= LEAST and not _is_former(bench):
            first, *rest = (row for row in timed if row is not None)
            ratios = [speedup_between(first, row, "", bench.settings.seed, None) for row in rest]
            shape = f"{bench.target.name}, {cell.batch} x {cell.length}"
            times = [figures.latency(row.median_ms or 0.0) for row in (first, *rest)]
            cells = [*times, *(_ratio(ratio, interval=True) for ratio in ratios)]
            now = min(ratio.value for ratio in ratios), cells
            found[shape] = min(found.get(shape, now), now, key=lambda each: each[0])
    precisions = [name for _, name in others]
    header = ["model, batch x tokens", "INT8, ms", *(f"{name}, ms" for name in precisions)]
    rows = [[shape, *cells] for shape, (_, cells) in found.items()]
    return table([*header, *(f"INT8 over {name}" for name in precisions)], rows)


def fp8_noise_table(data: Data) -> str:
    """SQNR of the answers over FP32 of INT8 and FP8, in dB, in the largest shape of each model."""
    found = dict[str, tuple[int, list[str]]]()
    for bench in data.benches:
        name = bench.target.name + ("" if bench.target.random_weights else ", trained")
        for cell in bench.configs if bench.target.kind != "model" else ():  # calibrated on random ids
            pair = [row_of(cell, name) for name in ("int8", "unpadded-fp8")]
            errors = [row.rel_error for row in pair if row is not None and row.rel_error]
            if len(errors) == len(pair) and cell.real_tokens > found.get(name, (0,))[0]:
                shape = f"{name}, {cell.batch} x {cell.length or label(bench.settings.dataset or '')}"
                found[name] = cell.real_tokens, [shape, *(f"{-20 * math.log10(e):.1f}" for e in errors)]
    return table(["model, batch x tokens", "INT8, dB", "FP8, dB"], sorted(row for _, row in found.values()))


def cpu_table(data: Data, *, amx: bool) -> str:
    """INT8 on CPUs with or without AMX over the fastest without INT8, NNCF's and ONNX Runtime's dynamic."""
    rows, fastest = [], set[str]()
    for bench in data.benches:
        if bench.cpu is None or ("amx_int8" in bench.cpu.features) != amx or bench.settings.threads == 1:
            continue
        labels = {system.name: system.label for system in bench.systems}
        for cell in bench.configs:
            best = over_fastest(bench.systems, cell, "int8")
            others = "nncf-openvino", "dynamic-onnxruntime"
            nncf, dynamic = (speedup_of(cell, "int8", each) for each in others)
            shape = f"{cell.batch} x {cell.length or label(bench.settings.dataset or '')}"
            if best is not None and cell.length in (None, 128):  # what the aims are for
                fastest.add(labels[best.baseline])
                one, base = cell.batch == 1, bench.target.name.startswith("bert-base")
                aims = (2.2 if base else 1.6) if one else 1.8 if base else 1.4, 1.15
                aims = aims if amx else (1.7, 1.1 if one else 1.15)
                told = (_aimed(ratio, aim) for ratio, aim in zip((best, nncf), aims, strict=True))
                cells = figures.latency(best.system_ms), *told, _ratio(dynamic, interval=True)
                rows.append([bench.target.name, shape, *cells])
    over = f"over {' or '.join(sorted(fastest))}"
    header = ["model", "batch x tokens", "INT8, ms", over, "over NNCF", "over dynamic"]
    return table(header, rows)


def _aimed(ratio: Speedup | None, aim: float) -> str:
    missed = ratio is not None and ratio.leading.value < aim
    return _ratio(ratio, interval=True) + (f" ({aim}x)" if missed else "")


def cpu_kernels_table(_: Data) -> str:
    """Kernel times on CPUs in batches, by tools/cpu_kernels.py: of INT8, its rival and no INT8."""
    rows, kinds = [], list[str]()
    for told in json.loads((ROOT / MEASURED / "kernels.json").read_text(encoding="utf-8")):
        batch, tokens = told["shape"].split(" x ")
        if (batch, tokens) != ("8", "128") and (told["model"][:4] == "bert" or tokens != "sst2"):
            continue
        unit, systems = "AMX" if "amx" in told["cpu"] else "VNNI", told["systems"].values()
        kinds = [kind for kind in told["systems"]["INT8"] if kind not in ("elementwise", "other")]
        columns = [[sums[kind] for sums in systems] for kind in kinds]
        whole = [sum(sums.values()) for sums in systems]
        columns += [[ms - sum(all_) for ms, *all_ in zip(whole, *columns, strict=True)], whole]
        cells = ("/".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" for ms in each) for each in columns)
        ort = ", ONNX Runtime" if told["runtime"].startswith("onnx") else ""
        rows.append([f"{told['model']}, {batch} x {label(tokens)}, {unit}{ort}", *cells])
    return table(["ms", *kinds, "rest", "all"], rows)


def cost_table(data: Data) -> str:
    """Texts a second, and the cost of a million at a price of 1 an hour: INT8 and the fastest without it."""
    shown: list[Timed] = [
        (H200, "bert-base", FUSED, "cuda", 32, 128),
        (H200, "bert-base", FUSED, "tensorrt_rtx", 32, 128),
        ("AMD EPYC, 2 cores", "minilm-l6-sst2", LINEARS, "openvino", 8, 128),
    ]
    rows = []
    for device, model, recipe, backend, batch, tokens in shown:
        best = data.lowest[device, model, recipe, backend, batch, tokens]
        systems, cell = next(
            (bench.systems, cell)
            for bench in data.benches
            if (_device(bench), bench.target.name) == (device, model)
            for _, _, cell, found in timed(bench)
            if found == best
        )
        labels = {system.name: system.label for system in systems}
        costs = [cost_of(cell, name, 1.0) or math.inf for name in (best.system, best.baseline)]
        rates = " / ".join(f"{1e6 / 3600 / cost:,.0f}" for cost in costs)
        sides = f"{label(backend)} / {labels[best.baseline]}"
        prices = " / ".join(f"{cost:.2g}" for cost in costs)
        rows.append([f"{model}, {batch} x {tokens}, {device}", sides, rates, prices])
    header = ["model, batch x tokens, machine", "INT8 / without", "texts a second", "a million texts"]
    return table(header, rows)


def recipes_table(data: Data) -> str:
    """What each recipe costs and brings with BERT, as in `recipes list`."""
    rows = []
    for figure in (each for each in _bert(data) if each.accuracy):
        mean, *told, lost, sqnr, speed = shipped.format_figure(figure)
        over = f"{mean} ({len({row.task for row in figure.judged})})"
        known = ("" if cell == shipped.NOT_MEASURED else cell for cell in (*told, sqnr, speed))
        held_out, worst, sqnr, speed = known
        cells = (over, held_out, worst, lost.replace("/", " of "), sqnr and f"{sqnr} dB", speed)
        rows.append([f"{code(figure.recipe)}, {shipped.BACKENDS[figure.backends]}", *cells])
    header = ["recipe", "mean (tasks)", "held out", "worst task", "lost", "SQNR", "speed-up"]
    return table(header, rows)


def _bert(data: Data) -> list[Figure]:
    return [figure for figure in data.figures if figure.recipe.startswith("bert-")]


def recipes_words(data: Data) -> str:
    choice = shipped.describe_choice(shipped.choose_start(figures=data.figures))
    return "\n\n".join(["", choice, *shipped.describe_conditions(_bert(data)), ""])


def real_table(data: Data) -> str:
    """Two recipes in `cuda` on a trained BERT-base and MPNet, by task."""
    rows = []
    for model, embedder in ((TRAINED, f"{TRAINED}-{EMBED.name}"), (MPNET, "mpnet")):
        for task in sorted({run.task.name for run in data.runs}, key=_task_order):
            named = embedder if task == EMBED.name else model
            runs = [_find(data, named, task, recipe, "cuda") for recipe in (ATTENTION, FUSED)]
            if (run := runs[0]) is None:
                continue
            for metric in (_metric(run), _metric(run) + SECOND):
                if metric not in run.stages.engine.metrics:
                    continue
                first = metric == _metric(run)
                size = f", n = {run.stages.engine.n:,}" if first else ""
                what = f"{code(named)}, {_task(task)}, {label(metric)}{size}"
                row = [what, _score(run, "fp32", metric)]
                for each in runs:
                    sqnr = figures.sqnr(each.stages.engine.vs_fp32).text if each and first else ""
                    row += [_loss(each, metric), sqnr]
                rows.append(row)
    named = [text for recipe in (ATTENTION, FUSED) for text in (f"{code(recipe)}, points", "SQNR")]
    return table(["model and task", "FP32", *named], rows)


def changed_table(data: Data) -> str:
    """How many predictions change at which SQNR, over engines of all tasks that have classes."""
    shares: dict[int, list[float]] = defaultdict(list)
    for run in data.runs:
        versus = run.stages.engine.vs_fp32 if _last(run, ("engine",)) else None
        if versus and versus.get("sqnr_db") and versus.get("disagreements") is not None:
            shares[int(versus.sqnr_db // SQNR_STEP)].append(versus.disagreements / versus.n)
    rows = []
    for place, same in sorted(shares.items()):
        step = f"{SQNR_STEP * place} to {SQNR_STEP * (place + 1)} dB"
        rows.append([step, str(len(same)), f"{min(same):.1%} to {max(same):.1%}"])
    return table(["SQNR", "engines", "predictions that changed"], rows)


def tensorrt_table(data: Data) -> str:
    """Points and SQNR of engines of TensorRT-RTX by model, recipe and task, and the mean over the tasks."""
    tasks = sorted({run.task.name for run in data.runs}, key=_task_order)
    rows, backend = [], "tensorrt_rtx"
    for model, names in IN_TENSORRT.items():
        for recipe in (FUSED, LINEARS):
            ran = {
                task: run
                for task in tasks
                for name in names
                if (run := _find(data, name, task, recipe, backend)) and _last(run, ("engine",))
            }
            cells = [_gain(ran[task]) if task in ran else "" for task in tasks]
            if ran:
                rows.append([f"{model}, {code(recipe)}", _mean([*ran.values()]), *cells])
    return table(["model and recipe", "mean", *map(_task, tasks)], rows)


def _gain(run: Record) -> str:
    versus = run.stages.engine.vs_fp32
    return f"{100 * versus.delta[_metric(run)] + 0.0:+.2f}/{versus.sqnr_db:.1f}"


def _alike(run: Record) -> str:
    """Return the name of a model without its task."""
    return _model_name(run).removesuffix(f"-{run.task.name}")


def qat_table(data: Data) -> str:
    """SQNR of PTQ, of the trained model and of its engine, by model, recipe, task; no QAT after another."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for run in data.runs:
        stages = [run.stages.get(name) for name in ("ptq", "fake_quant", "engine")]
        if run.trained and stages[0] and not (run.get("reconstruction") and run.get("training")):
            shown = [f"{each.vs_fp32.sqnr_db:.1f}" if each and each.vs_fp32 else "-" for each in stages]
            name = _short(run.recipe).removesuffix("-qat").removesuffix("-reconstructed")
            backend = run.engine.backend if run.engine else run.recipe["engine"]["backend"]
            row = f"{code(_alike(run))} {code(name)}"
            cells[row if backend == "cuda" else f"{row}, {label(backend)}"][run.task.name] = "/".join(shown)
    tasks = sorted({name for row in cells.values() for name in row}, key=_task_order)
    rows = [[row, *(found.get(name, "") for name in tasks)] for row, found in cells.items()]
    return table(["model", *map(_task, tasks)], sorted(rows))


def _reconstructed(data: Data) -> Iterator[tuple[str, Record]]:
    """Yield the runs with a reconstruction and no QAT after it, and the recipe that it began with."""
    for run in data.runs:
        if run.get("reconstruction") and not run.get("training"):
            yield _short(run.recipe).removesuffix("-reconstructed"), run


def qat_aims_table(data: Data) -> str:
    """What reconstruction reaches over all models and tasks, by recipe; losses by the first metric."""
    found: dict[str, list[Record]] = defaultdict(list)
    for recipe, run in _reconstructed(data):
        found[recipe].append(run)
    columns = []
    for runs in found.values():
        stages = "ptq", "fake_quant", "engine"
        ptq, trained, engines = ([run.stages[stage].vs_fp32 for run in runs] for stage in stages)
        gains = [after.sqnr_db - before.sqnr_db for before, after in zip(ptq, trained, strict=True)]
        nearer = [engine.sqnr_db > before.sqnr_db for before, engine in zip(ptq, engines, strict=True)]
        kept = [
            each.delta[_metric(run)] >= -2 * each.delta_stderr[_metric(run)]
            for run, each in zip(runs, engines, strict=True)
        ]
        columns.append([
            f"{fmean(gains):.1f} ({min(gains):.1f}-{max(gains):.1f})",
            "/".join(str(sum(gain >= least for gain in gains)) for least in (3, 6)) + f" of {len(runs)}",
            f"{sum(nearer)}/{len(runs)}",
            f"{sum(kept)}/{len(runs)}",
        ])  # fmt: skip
    aims = "dB over PTQ", "3/6 dB or more", "engine nearer than PTQ", "loss below two errors"
    rows = [[aim, *cells] for aim, *cells in zip(aims, *columns, strict=True)]
    return table(["aim", *map(code, found)], rows)


def qat_layers_table(data: Data) -> str:
    """SQNR that each layer's output gains on held-out rows, means over tasks, where several are measured."""
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for recipe, run in _reconstructed(data):
        found[_alike(run)][recipe].append(run.reconstruction.layers)
    recipes = sorted({recipe for each in found.values() for recipe in each})

    def gains(tasks: list[Any]) -> str:
        won = [[max(each.after_db or 0.0, each.before_db) - each.before_db for each in run] for run in tasks]
        return "/".join(f"{fmean(layer):.1f}" for layer in zip(*won, strict=True))

    rows = [
        [code(model), *(gains(each[recipe]) for recipe in recipes)]
        for model, each in sorted(found.items())
        if max(map(len, each.values())) > 1
    ]
    return table(["model", *map(code, recipes)], rows)


TRAINERS = {
    "ptq": "PTQ",
    "reconstruction": "`reconstruction`",
    "modelopt-qat": "`QATTrainer`",
    "modelopt-qad": "`QADTrainer`",
    "nncf-ptq": "NNCF's PTQ",
    "nncf-qat": "NNCF's QAT",
}


WITHOUT = {
    "reconstruction": "none",
    "without-weight": "weights",
    "without-ffn-out": "GELU",
    "without-attention": "attention",
    "without-residual": "residual",
    "without-activations": "activations",
}


PLAIN = ", not centered"


def _trainings() -> Iterator[tuple[str, str, list[Any]]]:
    """Yield model and recipe, the task, and what trained it; one row of a table may be several files."""
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for path in sorted((ROOT / MEASURED).glob("trainings-*.json")):
        each = files.read_json(path)
        plain = "" if each.get("centering", True) else PLAIN
        found[f"{code(each['model'])} {code(each['recipe'])}{plain}", each["task"]] += each["trainings"]
    for (name, task), trainings in sorted(found.items()):
        yield name, task, trainings


def qat_holds_table(data: Data) -> str:
    """SQNR after reconstruction of models that leave some tensors in FP32."""
    rows = []
    for name, _, trainings in _trainings():
        sqnr = {row["system"]: f"{row['sqnr_db']:.1f}" for row in trainings}
        if sqnr.keys() & {*WITHOUT} - {"reconstruction"}:
            rows.append([name, *(sqnr.get(each, "") for each in WITHOUT)])
    return table(["model", *WITHOUT.values()], rows)


def qat_trainers_table(data: Data) -> str:
    """SQNR, metric, seconds and GiB of trainers, each at the rate with the highest SQNR of those tried."""
    rows = []
    for name, task, trainings in _trainings():
        if not name.endswith(PLAIN):  # their trainers cannot keep the means of centered inputs
            continue
        metric, cells = GLUE[task].metrics[0], []
        for system in TRAINERS:
            tried = [row for row in trainings if row["system"] == system]
            row = max(tried, key=lambda row: float(row["sqnr_db"]), default={})
            shown = (("sqnr_db", 1, 1), (metric, 1, 4), ("seconds", 1, 0), ("peak_bytes", 2**30, 1))
            parts = [f"{row[key] / unit:.{digits}f}" if row.get(key) else "-" for key, unit, digits in shown]
            cells.append("/".join(parts).removesuffix("/-/-") if row else "")
        if any(cells[2:]):
            rows.append([name.removesuffix(PLAIN), *cells])
    return _filled(["model", *TRAINERS.values()], rows)


def families_table(data: Data) -> str:
    """The tasks that an engine ran with the present code, by family and backend."""
    tasks: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for run in data.runs:
        if _last(run, ("engine",)) and not differences(run.recipe):
            tasks[run.recipe.model["family"], label(run.engine.backend)][run.task.name] = None
    backends = sorted({backend for _, backend in tasks})
    rows = [
        [
            f"`{family.name}`",
            *(
                ", ".join(map(_task, sorted(tasks.get((family.name, backend), ()), key=_task_order)))
                for backend in backends
            ),
        ]
        for family in FAMILIES
    ]
    return table(["family", *backends], rows)


@cache
def _read(name: str) -> Any:
    return json.loads((ROOT / MEASURED / f"{name}.json").read_text(encoding="utf-8"))


TOOLS = {
    "ort-qdq": "ONNX Runtime `quantize_static`",
    "ort-qdq-uint8": "the same, UINT8, weights by channel",
    "ort-qoperator": "the same, QOperator",
    "ort-dynamic": "ONNX Runtime `quantize_dynamic`, which needs no data",
    "modelopt": "ModelOpt ONNX, INT8 max",
    "nncf": "NNCF on ONNX, transformer",
}


def foreign_table(data: Data) -> str:
    """Files of six tools in TensorRT-RTX and ONNX Runtime, before and after `fix`."""
    made = _read("foreign-tools")["rows"]
    rows = [["FP32 export", "", "", "", f"{made['fp32']['accuracy']:.4f}", ""]]
    for name, title in TOOLS.items():
        row = made[name]
        before, after = (row["report"][f"engine_{when}"] for when in ("before", "after"))
        fused = f"{after['attention_fused']} of {after['attentions']} ({after['attention_int8']})"
        scores = [f"{row[f'accuracy_{when}']:.4f}" for when in ("before", "after")]
        rows.append([title, *map(_gemms, (before, after)), fused, *scores])
    header = ["made by", "INT8 linears, before", "after `fix`", "attentions fused (INT8)"]
    return table([*header, "accuracy before", "after"], rows)


def _gemms(engine: dict[str, Any]) -> str:
    return "refused" if engine["refused"] else f"{engine['int8_gemms']} of {engine['gemms']}"


def foreign_words(data: Data) -> str:
    rows = _read("foreign-tools")["rows"]
    refused = sum(bool(rows[name]["report"]["engine_before"]["refused"]) for name in TOOLS)
    made = rows["modelopt"]
    counts = _gemms(made["report"]["engine_before"])
    return (
        f"TensorRT-RTX refuses {refused} of the {len(TOOLS)} files. Of ModelOpt's file it puts {counts} "
        f"linear layers in INT8, and accuracy in ONNX Runtime is {made['accuracy_before']:.4f} against "
        f"{rows['fp32']['accuracy']:.4f}; after `fix` it is "
        f"{made['accuracy_after']:.4f}"
    )


SERVED = {"bert-base": "BERT-base", "bert-base-embed": "BERT-base embeddings", "minilm": "MiniLM-L6"}


def _alone(run: str, tokens: int | None) -> float:
    """Return the texts a second of an engine alone."""
    rates = _read("serving")["engine"]
    return float(next(r["texts_per_s"] for r in rates if (r["run"], r["tokens"]) == (run, tokens)))


def _load(each: dict[str, Any]) -> tuple[str, str]:
    """Return connections and texts of a load, and the median and 99th percentile of its times in ms."""
    share = f" at {each['share']:.0%}" if each["share"] else ""
    load = f"{each['connections']:,}x{each['texts_per_request']}{share}"
    return load, f"{each['p50_ms']:.1f}/{each['p99_ms']:.1f}"


def serving_table(data: Data) -> str:
    rows, best = [], dict[Any, Any]()
    for each in sorted(_read("serving")["loads"], key=lambda each: float(each["texts_per_s"])):
        alone = each["connections"] == 1
        best[each["run"], each["tokens"], each["texts_per_request"], alone, each["share"]] = each
    # further ones are in the file
    shown = [each for each in best.values() if each["tokens"] != MRPC or each["run"].endswith("embed")]
    shown = [each for each in shown if each["run"] != "minilm" or not (each["tokens"] or each["share"])]
    for each in (each for each in _read("serving")["loads"] if each in shown):
        run, tokens, rate = each["run"], each["tokens"], each["texts_per_s"]
        load, times = _load(each)
        share = f"{rate / _alone(run, tokens):.0%}"
        rows.append([f"{SERVED[run]}, {tokens or 25}", load, f"{rate:,.0f}", share, times])
    return table(["model, tokens", "connections x texts", "texts/s", "of the engine's", "p50/p99 ms"], rows)


MRPC = 53  # tokens of a text: the mean of its pairs
BESIDE = [(1, 1, 0.0), (2000, 1, 0.0), (96, 32, 0.0), (1000, 1, 0.7)]  # loads of ours that peers stand beside


def serving_peers_table(data: Data) -> str:
    """Our server and others on two GPUs, for texts as they are."""
    rows, read = [], _read("serving-two-gpus")
    ours = [each | {"peer": "serve"} for each in read["loads"] if each["tokens"] is None]
    ours = [e for e in ours if (e["connections"], e["texts_per_request"], e["share"]) in BESIDE]
    for each in (*(each for each in ours if each["run"] != "minilm"), *read["peers"]):
        load, times = _load(each) if "connections" in each else ("in process", "")
        load += ", embeddings" if each["run"].endswith("embed") else ""
        rows.append([f"`{each['peer']}`", load, f"{each['texts_per_s']:,.0f}", times])
    return table(["server", "connections x texts", "texts/s", "p50/p99 ms"], rows)


def kills_words(data: Data) -> str:
    made = _read("serving-kills")
    killed, stopped = made["killed"], made["stopped"]
    assert not killed["lost"] + killed["wrong"] + stopped["wrong"] + stopped["status"]
    asked = sum(killed["statuses"].values())
    return f"{len(killed['replaced_after_s'])} kills under {asked:,} requests"


def _best(count: int) -> float:
    loads = [each for each in _read("serving")["loads"] if each["run"] == "bert-base"]
    return float(max(each["texts_per_s"] for each in loads if each["texts_per_request"] == count))


def ready_words(data: Data) -> str:
    times = _read("serving")["ready_s"].values()
    return f"{min(times):.1f} to {max(times):.1f} s"


def openvino_words(data: Data) -> str:
    made = _read("serving-openvino")["loads"][0]
    shares = made["share_of_engine"], made["share_by_cpu"]
    return "{:.0%} of the engine's own rate, and {:.0%} by CPU time".format(*shares)


def noop_table(data: Data) -> str:
    """CPU time of a server whose engine computes nothing."""
    rows = []
    for name in ("tokie", "tokenizers"):
        loads = _read(f"serving-noop-{name}")["loads"]
        cells = {f"{each['connections']} x {each['texts_per_request']}": each for each in loads}
        rows.append([f"`{name}`", *(f"{each['cpu_us_per_text']:.0f}" for each in cells.values())])
    return table(["us a text, by connections x texts", *cells], rows)


def triton_words(data: Data) -> str:
    """CPU time of all processes of Triton and of `serve`, on one run."""
    loads = (_read(f"serving-triton-{name}")["loads"] for name in ("triton", "run"))
    theirs, ours = ([f"{each['cpu_us_per_text']:,.0f}" for each in made] for made in loads)
    return (
        f"{theirs[0]} us of CPU at 8 connections and {theirs[1]} at 64, in `qdqbench serve` "
        f"{ours[0]} and {ours[1]}"
    )


def serving_files_table(data: Data) -> str:
    rows = []
    for run, each in {each["run"]: each for each in _read("serving")["files"]}.items():  # the last of each
        rate = each["rows_per_second"]
        counts = str(each["processes"]), f"{each['rows']:,}", f"{rate:,.0f}"
        rows.append([SERVED[run], *counts, f"{rate / _alone(run, None):.0%}", f"{each['whole_s']:.0f}"])
    return table(["model", "processes", "rows", "rows/s", "of the engine's", "s with loading"], rows)


def _start(data: Data) -> Figure:
    best = shipped.find_best("cuda", data.figures)
    return next(each for each in data.figures if (each.recipe, each.backends) == (best, "cuda"))


def beyond_words(data: Data) -> str:
    rows = [row for row in _start(data).judged if row.stderr and row.points < -2 * row.stderr]
    losses = ", ".join(f"{-row.points:.2f} ± {row.stderr:.2f} ({label(row.task)})" for row in rows)
    mean = _start(data).mean
    assert mean is not None
    told = f"{mean.beyond} of {mean.measurements} measurements lose more than two standard errors"
    return f"{told}{losses and f': {losses}'} ({mean.by_chance:.1f} by chance)"


def loss_words(data: Data) -> str:
    worst = _start(data).worst
    assert worst is not None
    return f"{-worst.points:.2f} ± {worst.stderr:.2f} points ({label(worst.task)}, n = {worst.n})"


def mean_words(data: Data) -> str:
    mean = _start(data).mean
    assert mean is not None
    return f"{mean.points:+.2f} ± {mean.stderr:.2f} points over {mean.tasks} tasks"


def real_words(data: Data) -> str:
    run = _find(data, TRAINED, "sst2", ATTENTION, "cuda")
    assert run is not None
    proven = f"{run.engine.int8_gemms} of {run.engine.expected_int8_gemms}"
    scores = f"{_score(run, 'engine')} against {_score(run, 'fp32')} in FP32"
    return f"{scores} ({_loss(run)} points, n = {run.stages.engine.n}), with {proven} GEMMs in INT8"


def cpu_words(data: Data) -> str:
    """What INT8 gains over the fastest without for one text of 128 tokens, on each CPU."""
    found: dict[str, str] = {}
    benches = (each for each in data.benches if each.cpu and each.settings.threads != 1)
    for bench in (each for each in benches if each.target.name.startswith("minilm")):
        cell = next((each for each in bench.configs if (each.batch, each.length) == (1, 128)), None)
        best = over_fastest(bench.systems, cell, "int8") if cell else None
        if best is not None and bench.cpu is not None:
            told = f"{best.value:.2f}x {best.interval}"
            found["with AMX" if "amx_int8" in bench.cpu.features else "without"] = told
    return " and ".join(f"{told} {cpu}" for cpu, told in sorted(found.items()))


def squad_words(data: Data) -> str:
    """Rows a second of BERT-large in `cuda` at the lengths of SQuAD."""
    found = []
    for bench in data.benches:
        for cell in bench.configs:
            if bench.settings.dataset == "SQuAD-like" and cell.length is None and not _is_former(bench):
                row = next(row_of(cell, s.name) for s in bench.systems if s.backend.split()[0] == "cuda")
                found.append(f"{row.sequences_per_s:,.0f} on the {_device(bench).split()[1]}")  # type: ignore[union-attr]
    return " and ".join(sorted(found, reverse=True))


MADE = [
    *(speed_table, fp8_noise_table, cpu_kernels_table, cost_table, recipes_table, recipes_words, real_table),
    *(changed_table, tensorrt_table, qat_table, qat_aims_table, qat_layers_table, qat_holds_table),
    *(qat_trainers_table, families_table, foreign_table, foreign_words, serving_table, serving_peers_table),
    *(kills_words, serving_files_table, triton_words, ready_words, openvino_words, noop_table),
    *(beyond_words, loss_words, mean_words, real_words, cpu_words, squad_words),
]
FIGURES: dict[str, Callable[[Data], str]] = {
    **{made.__name__.removesuffix("_table").replace("_", "-"): made for made in MADE},
    # `cuda` and TensorRT-RTX on two GPUs: at fixed shapes, then in the largest batches of data sets
    "kernels": lambda data: _by_gpu(data, int, "batch x tokens"),
    "lengths": lambda data: _by_gpu(data, str, "batch x split"),
    "fp8": lambda data: _beside_others(data, "int8", ("unpadded-fp8", "FP8")),
    "portable": lambda data: _beside_others(data, "int8-fused-ptx", (FP16, "FP16")),  # by mma.sync
    "cpu-amx": partial(cpu_table, amx=True),
    "cpu": partial(cpu_table, amx=False),
    "serving-words": lambda data: f"{_best(1):,.0f} requests of one text a second",
    "texts-words": lambda data: f"{_best(32):,.0f} texts/s",
}


def fill(before: str, page: str, made: Callable[[str], str]) -> str:
    """Return a page with each figure as it is measured.

    Raises:
        UserError: An unknown figure, or a mark without its other.
    """
    names = re.findall(r"<!-- figures:([\w-]+) -->", before)
    if names[1::2] != ["end"] * (len(names) // 2) or len(names) % 2 or "end" in names[::2]:
        raise UserError(f"{page}: each figure begins with {BEGIN.format('NAME')} and ends with {END}")
    if unknown := sorted({*names} - {*FIGURES, "end"}):
        raise UserError(f"{page} has unknown figures: {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    figure = re.escape(BEGIN).replace(r"\{\}", "([^ ]*)") + f".*?{re.escape(END)}"
    return re.sub(figure, lambda at: f"{BEGIN.format(at[1])}{made(at[1])}{END}", before, flags=re.S)


# Figures of `recipes list`, and all rows as CSV


def figures_of(runs: Sequence[Record], benches: Sequence[Bench]) -> list[Figure]:
    accuracy: dict[tuple[str, str], list[Accuracy]] = defaultdict(list)
    speed: dict[tuple[str, str], dict[tuple[str, int, int], Speed]] = defaultdict(dict)
    for run in runs:
        name = run.recipe["name"]
        backends = shipped.backends_of(run.engine.backend if run.engine else "tensorrt")
        if name in shipped_recipes() and not differences(run.recipe):
            accuracy[name, backends] += _accuracies(run)
    for bench in benches:
        for recipe, backends, row in _speeds(bench):
            least, shape = speed[recipe, backends], (row.model, row.length, row.batch)
            # the smallest, as benches do not all time the same others
            least[shape] = min(least.get(shape, row), row, key=lambda each: each.value)
    order = [*shipped_recipes()]
    return [
        Figure(
            recipe=key[0],
            backends=key[1],
            accuracy=tuple(sorted(accuracy[key], key=lambda row: (row.task, row.model, row.where))),
            speed=tuple(speed[key][shape] for shape in sorted(speed[key])),
        )
        for key in sorted({*accuracy, *speed}, key=lambda key: (order.index(key[0]), key[1]))
    ]


def _accuracies(run: Record) -> Iterator[Accuracy]:
    """Yield the primary metric of the last stage that ran, on both splits where the task has two."""
    if (stage := _last(run, ("engine", "onnxruntime", "fake_quant"))) is None:
        return
    versus = run.stages[stage].vs_fp32
    for metric in (_metric(run), _metric(run) + SECOND):
        if metric not in versus.delta:
            continue
        error = versus.delta_stderr.get(metric)
        yield Accuracy(
            model=model_label(run.model.name),
            task=run.task.name,
            metric=metric,
            points=round(100 * versus.delta[metric], 4),
            stderr=None if error is None else round(100 * error, 4),
            n=run.stages[stage].n,
            stage=stage,
            where=_where(run),
            sqnr_db=round(versus.sqnr_db, 2) if versus.get("sqnr_db") and metric == _metric(run) else None,
        )


def _speeds(bench: Bench) -> Iterator[tuple[str, shipped.Backends, Speed]]:
    """Yield the speed-ups of shipped recipes at fixed shapes."""
    for recipe, backend, cell, best in timed(bench):
        if recipe not in shipped_recipes() or cell.length is None:
            continue
        peer = row_of(cell, UNPADDED)
        system = next(each for each in bench.systems if each.name == best.system)
        baseline = next(each for each in bench.systems if each.name == best.baseline)
        yield (
            recipe,
            shipped.backends_of(backend),
            Speed(
                model=bench.target.name,
                batch=cell.batch,
                length=cell.length,
                value=round(best.value, 4),
                low=best.ci95_low and round(best.ci95_low, 4),
                high=best.ci95_high and round(best.ci95_high, 4),
                over=baseline.precision.upper(),
                where=f"{_device(bench)}, {_backend(*system.backend.split())}",
                padded=bench.device == "gpu" and (peer is None or peer.median_ms is None),
            ),
        )


def accuracy_rows(data: Data) -> Iterator[dict[str, Any]]:
    for run in data.runs:
        last, engine = _last(run, STAGES[::-1]), run.engine
        for metric in (_metric(run), _metric(run) + SECOND):
            if metric not in run.stages.fp32.metrics:
                continue
            scored = {stage: row.metrics.get(metric) for stage, row in run.stages.items() if row.metrics}
            versus = run.stages[last].vs_fp32 if last else Record(delta={}, delta_stderr={})
            yield {
                "model": _model_name(run), "task": run.task.name, "recipe": run.recipe["name"],
                "seed": run.seed, "where": _where(run), "metric": metric,
                **{stage: _digits(scored.get(stage)) for stage in STAGES},
                "difference": _digits(versus.delta.get(metric)),
                "stderr": _digits(versus.delta_stderr.get(metric)), "n": run.stages.fp32.n,
                "int8_gemms": f"{engine.int8_gemms} of {engine.expected_int8_gemms}" if engine else "",
                "gate": run.gate.state, "created": run.created[:10],
            }  # fmt: skip


def speed_rows(data: Data) -> Iterator[dict[str, Any]]:
    for bench in data.benches:
        backends = ((system, system.backend.partition(" ")[0]) for system in bench.systems)
        labels = {system.name: system.label for system, name in backends if not _is_former(bench, name)}
        for cell in bench.configs:
            for row in (row for row in cell.rows if row.system in labels and row.median_ms is not None):
                best = over_fastest(bench.systems, cell, row.system)
                yield {
                    "model": bench.target.name, "recipe": bench.recipe.get("name"), "where": _device(bench),
                    "engine_shapes": bench.settings.engine_shapes, "batch": cell.batch,
                    "tokens": cell.length or bench.settings.dataset, "system": labels[row.system],
                    "median_ms": _digits(row.median_ms), "over": labels[best.baseline] if best else "",
                    "speedup": _digits(best and best.value), "ci95_low": _digits(best and best.ci95_low),
                    "ci95_high": _digits(best and best.ci95_high), "created": bench.created[:10],
                }  # fmt: skip


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def contents() -> Iterator[tuple[Path, str]]:
    data = read_data(ROOT / MEASURED)
    made = cache(lambda name: FIGURES[name](data))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        before = path.read_text(encoding="utf-8")
        if END in before:
            yield path, fill(before, str(path.relative_to(ROOT)), made)
    yield ROOT / MEASURED / "accuracy.csv", _csv([*accuracy_rows(data)])
    yield ROOT / MEASURED / "speed.csv", _csv([*speed_rows(data)])
    rows = [figure.model_dump(mode="json") for figure in data.figures]
    yield ROOT / FIGURES_FILE, json.dumps(rows, indent=1) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 2 where it would")
    parser.add_argument("--add", type=Path, nargs="+", metavar="RUNS", help="folders of new results")
    options = parser.parse_args(arguments)
    for folder in options.add or ():
        for path in add(folder, ROOT / MEASURED):
            print(f"{path.relative_to(ROOT)} added")
    stale = [
        (path, page)
        for path, page in contents()
        if not path.is_file() or path.read_text(encoding="utf-8") != page
    ]
    for path, page in stale:
        print(f"{path.relative_to(ROOT)} {'does not hold these results' if options.check else 'written'}")
        if not options.check:
            files.write_text(path, page)
    return 2 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
