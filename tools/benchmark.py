"""Cost of a whole run, stage by stage, and of calibration against the number of samples; wall time of
`qdqbench sensitivity`.

    python tools/benchmark.py --model FOLDER --task sst2 --data FOLDER
    python tools/benchmark.py --model FOLDER --task sst2 --data FOLDER --only-run

Every measurement is a fresh process. Prints one table each; exit status 0 unless a run fails.

Of the run every time is also given as a multiple of what the FP32 evaluation alone took in that run (its
batches through the model, without imports and loading). Those of CPU time hardly change with other load.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

SAMPLES = (128, 4096)
RECIPE = "bert-int8-linears"
INSIDE = "--inside"  # a run in this process, and not one of the user's options


def run(arguments: list[str], out: Path, command: str = "run") -> float:
    """One `qdqbench run`, or another command; wall seconds of the whole process."""
    start = time.perf_counter()
    line = ["qdqbench", command, *arguments, "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2):
        sys.exit(done.stderr)
    return time.perf_counter() - start


def measured_run(told: Path, arguments: list[str]) -> None:
    """One `qdqbench` command in this process; writes wall and CPU seconds of it and of its evaluations."""
    from qdqbench.quantize.utils.system.process import disable_malloc_trim, relax_gc, use_passive_wait

    use_passive_wait()
    disable_malloc_trim()
    relax_gc()
    from qdqbench.cli import app
    from qdqbench.eval.metrics import logits
    from qdqbench.quantize.utils.system.process import measure_cost

    plain, found = logits.predict, {}

    def predict(*given: Any, stage: str, **options: Any) -> Any:
        with measure_cost() as cost:
            answers = plain(*given, stage=stage, **options)
        wall, cpu = found.get(stage, (0.0, 0.0))  # MNLI has two splits
        found[stage] = wall + cost.wall_s, cpu + cost.cpu_s
        return answers

    logits.predict = predict
    sys.argv[1:] = arguments
    start, used = time.perf_counter(), sum(os.times()[:4])  # of all threads, whatever they count for
    try:
        app.main()
    except SystemExit as stop:
        if stop.code not in (0, 2):
            raise
    whole = time.perf_counter() - start, sum(os.times()[:4]) - used
    told.write_text(json.dumps({"evaluations": found, "whole": whole}))


def stages(arguments: list[str], folder: Path) -> None:
    """Print what each stage of a run cost, and against its FP32 evaluation."""
    out, told = folder / "run", folder / "told.json"
    line = [sys.executable, __file__, INSIDE, str(told), "run", *arguments, "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if not told.is_file():
        sys.exit(done.stderr)
    found = json.loads(told.read_text())
    timings = json.loads((out / "results.json").read_text())["timings"]
    rows = [(name, row["wall_s"], row["cpu_s"], row["peak_rss_bytes"]) for name, row in timings.items()]
    wall, cpu = (all_of_it - sum(row[n] for row in rows) for n, all_of_it in enumerate(found["whole"], 1))
    rows += [("imports, data, report", wall, cpu, 0), ("all", *found["whole"], max(row[3] for row in rows))]
    rows += [(f"in these: {name} evaluated", *cost, 0) for name, cost in found["evaluations"].items()]
    _, wall, cpu, _ = next(row for row in rows if "fp32" in row[0])
    print(f"{'stage':36}{'wall s':>8}{'CPU s':>8}{'of FP32: wall':>15}{'CPU':>8}{'peak MB':>9}")
    for name, wall_s, cpu_s, memory in rows:
        peak = f"{memory / 1e6:.0f}" if memory else ""
        print(f"{name:36}{wall_s:8.1f}{cpu_s:8.1f}{wall_s / wall:15.2f}{cpu_s / cpu:8.2f}{peak:>9}")


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == [INSIDE]:
        measured_run(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "task", "data"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--only-sensitivity", action="store_true", help="leave out the run and calibration")
    parser.add_argument("--only-run", action="store_true", help="leave out calibration and sensitivity")
    parser.add_argument("--limit", help="evaluate the run on this many samples only")
    options = parser.parse_args()
    where = ["--model", options.model, "--task", options.task, "--data", options.data]
    if options.only_sensitivity:
        with tempfile.TemporaryDirectory() as folder:
            sensitivity(where, Path(folder) / "sensitivity")
        return
    with tempfile.TemporaryDirectory() as folder:
        limit = ["--limit", options.limit] if options.limit else []
        stages([RECIPE, *where, *limit], Path(folder))
        if options.only_run:
            return
        print("\ncalibration  samples  wall s  peak MB")
        for samples in SAMPLES:
            shown = subprocess.run(["qdqbench", "recipes", "show", RECIPE], capture_output=True, check=True)
            recipe = yaml.safe_load(shown.stdout)
            recipe["calibration"]["samples"] = samples
            path = Path(folder) / f"{samples}.yaml"
            path.write_text(yaml.safe_dump(recipe))
            out = Path(folder) / f"calibrate-{samples}"
            run([str(path), *where, "--until", "quantize"], out)
            cost = json.loads((out / "stages.json").read_text())["stages"]["quantize"]
            print(f"{'':11}{samples:9}{cost['wall_s']:8.1f}{cost['peak_rss_bytes'] / 1e6:9.0f}")
        sensitivity(where, Path(folder) / "sensitivity")


def sensitivity(where: list[str], out: Path) -> None:
    """Time of `qdqbench sensitivity` with its defaults; the goal is 6 minutes on two cores."""
    wall = run([RECIPE, *where], out, "sensitivity")
    found = json.loads((out / "sensitivity.json").read_text())
    lines = (out / "sensitivity.trials.jsonl").read_text().splitlines()
    cores = os.environ.get("OMP_NUM_THREADS") or found["environment"]["cores"]
    print(
        f"\nsensitivity: {wall:.1f} s, {len(lines) - 1} measurements on {found['data']['samples']} samples, "
        f"{cores} threads; calibration and start {wall - found['timings']['candidates_s']:.1f} s of it"
    )


if __name__ == "__main__":
    main()
