"""Peers of `serve`, asked by tools/load_serve.py as our server is.

python -m tools.serve_peers RUN unpadded QUEUE FRONTS     our fronts, before an unpadded FP16 encoder
python -m tools.serve_peers RUN litserve QUEUE FRONTS     `litserve`, before the same encoder
python -m tools.serve_peers RUN triton QUEUE FRONTS       a real Triton, by the Python of TRITON_PYTHON
python -m tools.serve_peers RUN sentence-transformers TEXTS     in this process, FP16 on a GPU
"""

import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from tokenizers import Tokenizer

from qdqbench.eval.bench.peers import OUTPUT, Packing, UnpaddedEncoder, sdpa_model
from qdqbench.quantize.deployment.opened import Answering
from qdqbench.quantize.deployment.serve import ServeOptions, open_served
from qdqbench.quantize.deployment.triton.export import export_triton
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.standalone.model import Model
from qdqbench.quantize.standalone.server.server import serve

litserve = import_module("litserve") if find_spec("litserve") else None
SIZES = (2048, 4096, 8192, 16_384)  # tokens of a launch, each compiled by torch.compile
BATCH = 64  # texts that `litserve` and `sentence-transformers` take at once


class Flight:
    def __init__(self, answers, done):
        self.answers, self.done = answers, done

    def query(self):
        return self.done.query()

    def read(self):
        self.done.synchronize()
        return self.answers.numpy()


class Unpadded:
    """Launches as backend cuda has them, of packed tokens in FP16."""

    def __init__(self, run):
        session = Session(read_config(run), run)
        self.longest = session.recipe.export.max_length
        self.encoder, self.runs = UnpaddedEncoder(sdpa_model(session.new_model(), "fp16", "cuda")), {}
        for size in SIZES:  # now: it takes seconds
            ids = np.ones(size, np.int32)
            self.launch(ids, ids * 0, np.full(size // self.longest, self.longest)).read()

    def launch(self, ids, types, lengths):
        import torch

        count, rows = len(ids), len(lengths)
        size = next(size for size in SIZES if count <= size)
        most = size // 4 if rows <= size // 4 else size
        flat, starts = np.zeros(3 * size + most + 1, np.int32), lengths.cumsum() - lengths
        flat[:count], flat[2 * size : 2 * size + count] = ids, types
        flat[size : size + count] = np.arange(count) - np.repeat(starts, lengths)
        flat[3 * size :] = count
        flat[3 * size : 3 * size + rows] = starts
        packed = torch.from_numpy(flat)
        if (size, most) not in self.runs:
            packing = Packing(size, most, self.longest, [flat], [rows])
            self.runs[size, most] = self.encoder.bind(packing, None)
        bound = self.runs[size, most]
        with torch.cuda.stream(bound.stream):
            bound.inputs["packed"].copy_(packed.pin_memory(), non_blocking=True)
            bound.launch()
            made = bound.outputs[OUTPUT][:rows].float()
            answers = torch.empty(made.shape, pin_memory=True)
            answers.copy_(made, non_blocking=True)
            done = torch.cuda.Event()
            done.record(bound.stream)
        return Flight(answers, done)


def serve_unpadded(run, queue, fronts):
    served = open_served(run, ServeOptions(no_fp32=True))
    served = replace(served, models={"engine": partial(Unpadded, run)}, made_with="unpadded FP16")
    options = ServeOptions(port=0, queue=queue, fronts=fronts, no_fp32=True)
    serve(served, options.settings(), lambda url, _: print(url, flush=True))


class Api(litserve.LitAPI if litserve else object):
    """Texts to answers by the encoder."""

    run = None

    def setup(self, device):
        answering = Answering.of(Path(self.run))
        self.model = Model(answering.told, Tokenizer.from_str(answering.tokenizer), Unpadded(Path(self.run)))

    def decode_request(self, request):
        return request["texts"]

    def batch(self, inputs):
        return inputs

    def predict(self, requests):
        answers = iter(self.model.predict([text for texts in requests for text in texts]))
        return [[next(answers) for _ in texts] for texts in requests]

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return {"answers": output}


def serve_lit(run, queue, fronts):
    api = Api(max_batch_size=BATCH, batch_timeout=0.001, api_path="/v1/predict")
    api.run = str(run)
    server = litserve.LitServer(api, accelerator="cpu", timeout=60)
    threading.Thread(target=announce, daemon=True).start()
    server.run("127.0.0.1", 8765, fronts, log_level="error", generate_client_file=False)


def serve_triton(run, *_):
    """Triton on the exported run, as tests/support/real_triton.py starts it."""
    out = Path(tempfile.mkdtemp()) / "triton"
    export_triton(run / "deploy", out, "served")
    python = os.environ.get("TRITON_PYTHON", sys.executable)
    os.execv(python, [python, "tests/support/real_triton.py", str(out)])


def announce():
    """Print the address as soon as it answers."""
    while True:
        try:
            urlopen("http://127.0.0.1:8765/health").read()
        except OSError:
            time.sleep(0.1)
        else:
            print("http://127.0.0.1:8765", flush=True)
            return


def time_library(run, texts):
    """Texts a second of `sentence-transformers`, which sorts them by length, in one process."""
    import torch
    from sentence_transformers import SentenceTransformer

    session, device = Session(read_config(run), run), "cuda" if torch.cuda.is_available() else "cpu"
    model = SentenceTransformer(session.model_name, device=device)
    model = model.half() if device == "cuda" else model
    for _ in range(2):  # the first time prepares
        begun = time.perf_counter()
        made = model.encode(texts, batch_size=BATCH)
        rate = round(len(texts) / (time.perf_counter() - begun))
    print(json.dumps({"dtype": str(made.dtype), "device": device, "batch": BATCH, "texts_per_s": rate}))


def main():
    run, kind, *more = sys.argv[1:]
    if kind == "sentence-transformers":
        time_library(Path(run), Path(more[-1]).read_text(encoding="utf-8").splitlines())
    else:
        {"unpadded": serve_unpadded, "litserve": serve_lit, "triton": serve_triton}[kind](
            Path(run), *map(int, more)
        )


if __name__ == "__main__":
    main()
