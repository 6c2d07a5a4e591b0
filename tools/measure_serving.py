"""Servers of several runs on one GPU machine, one load after the other: rates, latencies, CPU time, files.

    python -m tools.measure_serving RUNS --texts FILE --out docs/measured/serving.json

RUNS has the folders `bert-base` and `minilm`, runs of a classification, and `bert-base-embed`, of embeddings.
All servers start at once, one load after the other follows, and at last files are answered. The first cores
are those of the server, the last ones of the client processes. It takes minutes on an H200 with 16 cores.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from tools import load_serve

from qdqbench.quantize.deployment.opened import Answering
from qdqbench.quantize.deployment.predict import predict_files
from qdqbench.quantize.deployment.predict_options import PredictOptions
from qdqbench.quantize.utils.system.cpu import usable_cores

CLIENTS, FRONTS, QUEUE = 6, 8, 4096
RUNS = ("bert-base", "bert-base-embed", "minilm")
MRPC = 53  # tokens of a text: the mean of its pairs
LOADS = [  # run, tokens of a text (None: as it is), connections, texts of a request, share of the full rate
    ("bert-base", None, 1, 1, 0.0),
    ("bert-base", None, 400, 1, 0.0),
    ("bert-base", None, 800, 1, 0.0),
    ("bert-base", None, 16, 32, 0.0),
    ("bert-base", None, 96, 32, 0.0),
    ("bert-base", 128, 96, 32, 0.0),
    ("bert-base-embed", MRPC, 96, 32, 0.0),
    ("bert-base", None, 800, 1, 0.7),
    ("bert-base", None, 400, 32, 0.7),
    ("bert-base", None, 2000, 32, 3.0),
    ("minilm", None, 1, 1, 0.0),
    ("minilm", None, 800, 1, 0.0),
    ("minilm", None, 96, 32, 0.0),
    ("minilm", None, 800, 1, 0.7),
]
FILES = [("bert-base", 8), ("bert-base", 4), ("minilm", 8)]  # run, processes


def start(run, servers, ready):
    """Start the server of a run on the first cores."""
    command = [sys.executable, "-m", "qdqbench", "serve", run, "--port", 0, "--no-fp32"]
    command += ["--queue", QUEUE, "--fronts", FRONTS]
    cores = usable_cores()[: max(1, len(usable_cores()) - CLIENTS)]
    begun = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(process.pid, cores)
    while line := process.stdout.readline():
        if "http://127.0.0.1:" in line:
            port = int(line.partition("http://127.0.0.1:")[2].split()[0].split("/")[0])
            servers[run.name], ready[run.name] = (process, port), round(time.perf_counter() - begun, 2)
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="one a line")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a file")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    texts = [line for line in arguments.texts.read_text(encoding="utf-8").splitlines() if line]
    tokenizer = Answering.of(arguments.runs / RUNS[0]).tokenizer
    kinds = {None: texts} | {n: load_serve.lengthen(texts, n, tokenizer) for n in (MRPC, 128)}
    servers, found = {}, {"ready_s": {}, "engine": [], "loads": [], "files": []}
    found["machine"] = load_serve.describe_machine()

    def keep(part, row):
        found[part].append(row)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    starts = [
        threading.Thread(target=start, args=(arguments.runs / run, servers, found["ready_s"])) for run in RUNS
    ]
    for each in starts:
        each.start()
    for each in starts:
        each.join()
    try:
        for run, tokens in dict.fromkeys(load[:2] for load in LOADS):
            rate, _ = load_serve.engine_rate(arguments.runs / run, kinds[tokens], 1.0)
            keep("engine", {"run": run, "tokens": tokens, "texts_per_s": round(rate)})
        full = {}
        for run, tokens, connections, count, share in LOADS:
            process, port = servers[run]
            path = "/v1/embeddings" if run.endswith("embed") else "/v1/predict"
            asking = load_serve.Asking(process.pid, port, path, kinds[tokens], arguments.seconds, CLIENTS)
            made = asking.load(connections, count, share * full.get((run, count), 0.0))
            full[run, count] = max(full.get((run, count), 0.0), 0.0 if share else made["answered_per_s"])
            keep("loads", {"run": run, "tokens": tokens, "share": share} | made)
    finally:
        for process, _ in servers.values():
            process.kill()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "texts.parquet"
        pa.parquet.write_table(pa.table({"text": draw.choices(texts, k=arguments.rows)}), data)
        for run, processes in FILES:
            out = Path(folder) / f"{run}-{processes}.parquet"
            options = PredictOptions(run=arguments.runs / run, data=data, out=out, processes=processes)
            begun = time.perf_counter()
            made = predict_files(options.model_copy(update={"text_column": ["text"]})).model_dump()
            kept = {name: made[name] for name in ("rows", "seconds", "rows_per_second", "processes")}
            keep("files", {"run": run} | kept | {"whole_s": round(time.perf_counter() - begun, 2)})


if __name__ == "__main__":
    main()
