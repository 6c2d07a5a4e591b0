"""Servers of several runs on one GPU machine, one load after the other: rates, latencies, CPU time, files.

    python -m tools.measure_serving RUNS --texts FILE --out docs/measured/serving.json [--parts loads,peers]

RUNS has the folders `bert-base` and `minilm`, runs of a classification, and `bert-base-embed`, of embeddings.
Each server starts alone, then one load after the other follows. The first cores are those of the server, the
last ones of the client processes. Parts that are not asked for stay in the file as they are. It takes minutes
on an H200 with 16 cores.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from tools import load_serve

from qdqbench.quantize.deployment.opened import Answering
from qdqbench.quantize.deployment.predict import predict_files
from qdqbench.quantize.deployment.predict_options import PredictOptions
from qdqbench.quantize.standalone.server.engine import PREPARE_S

CLIENTS, QUEUE = 4, 4096
RUNS = ("bert-base", "bert-base-embed", "minilm")
MRPC = 53  # tokens of a text: the mean of its pairs
ENGINES = [("bert-base", None), ("bert-base", MRPC), ("bert-base", 128), ("bert-base-embed", MRPC)]
ENGINES += [("bert-base-embed", None), ("minilm", None), ("minilm", MRPC), ("minilm", 128)]
LOADS = [  # run, tokens of a text (None: as it is), connections, texts of a request, share of the full rate
    ("bert-base", None, 1, 1, 0.0),
    ("bert-base", None, 1000, 1, 0.0),
    ("bert-base", None, 2000, 1, 0.0),
    ("bert-base", None, 96, 32, 0.0),
    ("bert-base", 128, 96, 32, 0.0),
    ("bert-base-embed", None, 96, 32, 0.0),
    ("bert-base-embed", MRPC, 96, 32, 0.0),
    ("bert-base", None, 1000, 1, 0.7),
    ("bert-base", None, 400, 32, 0.7),
    ("bert-base", None, 2000, 32, 3.0),
    ("bert-base", MRPC, 1000, 1, 0.0),
    ("bert-base", MRPC, 96, 32, 0.0),
    ("minilm", None, 1, 1, 0.0),
    ("minilm", None, 1000, 1, 0.0),
    ("minilm", None, 96, 32, 0.0),
    ("minilm", None, 1000, 1, 0.7),
    ("minilm", MRPC, 1000, 1, 0.0),
    ("minilm", MRPC, 96, 32, 0.0),
    ("minilm", 128, 96, 32, 0.0),
]
PEERS = [  # peer, run, connections and texts of a request; without them it is asked in its own process
    ("unpadded", "bert-base", [(1000, 1), (96, 32)]),
    ("triton", "bert-base", [(8, 1), (64, 1), (64, 32)]),
    ("sentence-transformers", "bert-base-embed", []),
    ("litserve", "bert-base", [(200, 1), (64, 32)]),
]
FILES = [("bert-base", 6), ("bert-base", 8), ("minilm", 6)]  # run, processes


def start(run, peer=None):
    """Start the server of a run, or a peer, on the first cores: its process, port, and seconds until then."""
    cores = load_serve.order_cores()
    cores = cores[: max(2, len(cores) - CLIENTS)]
    fronts = len(cores) - 1  # and a core for the engine
    command = ["qdqbench", "serve", run, "--port", 0, "--no-fp32", "--queue", QUEUE, "--fronts", fronts]
    if peer:
        command = ["tools.serve_peers", run, peer, QUEUE, fronts]
    command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", *command]
    begun = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    while line := process.stdout.readline():
        if "http://127.0.0.1:" in line:
            port = int(line.partition("http://127.0.0.1:")[2].split()[0].split("/")[0])
            return process, port, round(time.perf_counter() - begun, 2)
    raise SystemExit(f"the server of {run} did not start")


def end(pid):
    server = load_serve.psutil.Process(pid)
    for process in (*server.children(recursive=True), server):
        process.kill()


def time_predict(run, data, processes):
    """Rows a second of `predict`."""
    with tempfile.TemporaryDirectory() as folder:
        options = PredictOptions(run=run, data=data, out=Path(folder) / "a.parquet", processes=processes)
        begun = time.perf_counter()
        made = predict_files(options.model_copy(update={"text_column": ["text"]})).model_dump()
    kept = {name: made[name] for name in ("rows", "seconds", "rows_per_second", "processes")}
    return {"run": run.name} | kept | {"whole_s": round(time.perf_counter() - begun, 2)}


class Measuring:
    """What is measured of which runs, written as soon as it is there."""

    def __init__(self, arguments):
        texts = [line for line in arguments.texts.read_text(encoding="utf-8").splitlines() if line]
        self.runs, self.asked, self.texts = arguments.runs, arguments, texts
        tokenizer = Answering.of(self.runs / RUNS[0], texts=False).tokenizer
        self.kinds = {n: load_serve.lengthen(texts, n, tokenizer) for n in (MRPC, 128)} | {None: texts}
        self.found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"ready_s": {}}
        self.found["machine"] = load_serve.describe_machine()

    def keep(self, part, row):
        print(row, flush=True)
        self.found[part].append(row)
        self.asked.out.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def ask(self, server, load, full=0.0, path=None):
        run, tokens, connections, count, share = load
        path = path or ("/v1/embeddings" if run.endswith("embed") else "/v1/predict")
        asking = load_serve.Asking(*server, path, self.kinds[tokens], self.asked.seconds, CLIENTS)
        made = asking.load(connections, count, share * full)
        return {"run": run, "tokens": tokens, "share": share} | made

    def loads(self):
        servers, full = {}, {}
        try:
            for run in RUNS:
                process, port, self.found["ready_s"][run] = start(self.runs / run)
                servers[run] = process.pid, port
            time.sleep(PREPARE_S)
            for load in LOADS:
                run, tokens, _, count, share = load
                made = self.ask(servers[run], load, full.get((run, tokens, count), 0.0))
                if not share:
                    most = max(full.get((run, tokens, count), 0.0), made["answered_per_s"])
                    full[run, tokens, count] = most
                self.keep("loads", made)
        finally:
            for pid, _ in servers.values():
                end(pid)

    def engine(self):
        for run in RUNS:
            given = [tokens for name, tokens in ENGINES if name == run]
            rates = load_serve.engine_rates(self.runs / run, [self.kinds[each] for each in given], 1.0)
            for tokens, (rate, _) in zip(given, rates, strict=True):
                self.keep("engine", {"run": run, "tokens": tokens, "texts_per_s": round(rate)})

    def kills(self):
        process, port, _ = start(self.runs / "minilm")
        load = load_serve.Load(port, self.texts[:200])
        found = load_serve.hold(load, process, self.asked.seconds, load_serve.MOST_RATE)
        self.keep("kills", asyncio.run(found))

    def peers(self):
        for peer, run, loads in PEERS:
            if not loads:
                command = [sys.executable, "-m", "tools.serve_peers", self.runs / run, peer, self.asked.texts]
                made = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
                self.keep("peers", {"peer": peer, "run": run} | json.loads(made.stdout.splitlines()[-1]))
                continue
            process, port, _ = start(self.runs / run, peer)
            for connections, count in loads:
                load, path = (run, None, connections, count, 0.0), load_serve.PATHS.get(peer)
                made = self.ask((process.pid, port), load, path=path)
                self.keep("peers", {"peer": peer} | made)
            end(process.pid)

    def files(self):
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "texts.parquet"
            drawn = random.Random(0).choices(self.texts, k=self.asked.rows)
            pa.parquet.write_table(pa.table({"text": drawn}), data)
            for run, processes in FILES:
                self.keep("files", time_predict(self.runs / run, data, processes))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="one a line")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a file")
    parser.add_argument("--parts", default="loads,engine,kills,peers,files")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    measuring = Measuring(arguments)
    for part in arguments.parts.split(","):
        measuring.found[part] = []
        getattr(measuring, part)()


if __name__ == "__main__":
    main()
