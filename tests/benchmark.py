"""Wall time and peak memory of a whole run, stage by stage, and of calibration against the number of samples;
wall time of `qdqbench sensitivity`.

    python tests/benchmark.py --model FOLDER --task sst2 --data FOLDER

Every measurement is a fresh process. Prints one table each; exit status 0 unless a run fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

SAMPLES = (128, 4096)
RECIPE = "bert-int8-linears"


def run(arguments: list[str], out: Path, command: str = "run") -> float:
    """One `qdqbench run`, or another command; wall seconds of the whole process."""
    start = time.perf_counter()
    line = ["qdqbench", command, *arguments, "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2):
        sys.exit(done.stderr)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "task", "data"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--only-sensitivity", action="store_true", help="leave out the run and calibration")
    options = parser.parse_args()
    where = ["--model", options.model, "--task", options.task, "--data", options.data]
    if options.only_sensitivity:
        with tempfile.TemporaryDirectory() as folder:
            sensitivity(where, Path(folder) / "sensitivity")
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        wall = run([RECIPE, *where], out)
        subprocess.run(["qdqbench", "profile", str(out)], check=True)
        print(f"\nwhole process: {wall:.1f} s\n\ncalibration  samples  wall s  peak MB")
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
    lines = (out / "sensitivity.partial.jsonl").read_text().splitlines()
    cores = os.environ.get("OMP_NUM_THREADS") or found["environment"]["cores"]
    print(
        f"\nsensitivity: {wall:.1f} s, {len(lines) - 1} measurements on {found['data']['samples']} samples, "
        f"{cores} threads; calibration and start {wall - found['timings']['candidates_s']:.1f} s of it"
    )


if __name__ == "__main__":
    main()
