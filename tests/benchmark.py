"""Wall time and peak memory of a whole run, stage by stage, and of calibration against the number of samples.

    python tests/benchmark.py --model FOLDER --task sst2 --data FOLDER

Every measurement is a fresh process. Prints one table each; exit status 0 unless a run fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

SAMPLES = (128, 4096)
RECIPE = "bert-int8-linears"


def run(arguments: list[str], out: Path) -> float:
    """One `qdqbench run`; wall seconds of the whole process."""
    start = time.perf_counter()
    command = ["qdqbench", "run", *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
    options = parser.parse_args()
    where = ["--model", options.model, "--task", options.task, "--data", options.data]
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


if __name__ == "__main__":
    main()
