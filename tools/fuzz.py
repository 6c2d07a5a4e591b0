"""Random search for inputs that break a reader: damaged bytes and disfigured graphs, for a limited time.

    python -m tools.fuzz [--minutes 5] [--seed N] [TARGET ...]

A target is a reader of foreign files, or an endpoint of `serve`, which reads the bytes of a connection.
Rounds go over all targets, 20 s each, with a new seed. What breaks a reader is shortened, printed with its
seed and appended to `tests/golden/broken_files.json`, which the tests replay. The last lines sum up cases,
CPU seconds and faults; the exit status is 1 where there is a fault.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from tests.support import requests as http
from tests.support.disfigured import disfigure
from tests.support.fake_served import tiny_served
from tests.support.foreign_layer import float_layer
from tests.support.fuzz import BASES, broken
from tests.support.records import engine_result
from tests.support.site import Setup, Transport
from tests.support.tiny_layer import FORMS, healthy

from qdqbench.eval.bench.results import read_bench
from qdqbench.eval.metrics.logits import read_answers
from qdqbench.eval.runs.gate import issue_sentence, judge_gate, judge_stages
from qdqbench.eval.runs.results import RESULTS_FILE, read_results
from qdqbench.quantize.calibration.record import read_record
from qdqbench.quantize.deployment.hub import find_license
from qdqbench.quantize.engine.cuda import plan as cuda
from qdqbench.quantize.engine.cuda.check import list_arrays
from qdqbench.quantize.engine.cuda.compile import get_version
from qdqbench.quantize.engine.cuda.file import read_file, write_safetensors
from qdqbench.quantize.engine.cuda.names import NAMES, find_target, list_kernels
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.engine.trtexec import read_profile
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.lint.cache_import import read_cache_file
from qdqbench.quantize.lint.check import check_file, check_model, to_json
from qdqbench.quantize.lint.diagnose import diagnose
from qdqbench.quantize.lint.fix import FixOptions, rewrite
from qdqbench.quantize.lint.runs import read_feeds
from qdqbench.quantize.models.identity import choose_prompts, embedding_notes
from qdqbench.quantize.models.load import read_class_names
from qdqbench.quantize.recipe.schema import load_recipe, read_source, shipped_recipes
from qdqbench.quantize.standalone.server.http import Connection, Site
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.utils.arrays import read_arrays
from qdqbench.quantize.utils.errors import QdqError
from qdqbench.quantize.utils.schema import read

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "tests" / "golden" / "broken_files.json"
SECONDS, MEGABYTES = 20.0, 700  # of CPU and of memory for one case
ROUND_S = 20.0  # of a target
Reader = Callable[[Path], object]


class Target(NamedTuple):
    """A reader, good files, what makes an odd file that is well-formed, its name, and files beside it."""

    read: Reader
    samples: Callable[[], list[bytes]]
    odd: Callable[[list[bytes], random.Random], bytes] | None = None
    file: str = "file"
    beside: Mapping[str, Callable[[], bytes]] = {}

    def place(self, folder: Path) -> Path:
        """Write the files beside, and return where the reader's file belongs."""
        for name, made in self.beside.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(made())
        (folder / self.file).parent.mkdir(exist_ok=True)
        return folder / self.file


def rewritten(path: Path) -> object:
    """Do what `fix` does to a graph before it runs it."""
    model = read_model(path)
    if {row.code for row in check_model(model).findings} & {"invalid-onnx", "opset-too-low"}:
        return None
    return rewrite(model, FixOptions(), {})


def judged(path: Path) -> object:
    """Do what the gate does with the results of a run."""
    config = SimpleNamespace(task=GLUE["sst2"])
    found = {
        "folder": path.parent,
        "recipe": load_recipe("bert-int8-linears"),
        "gold": {"validation": np.zeros(9, int)},
    }
    session: Any = SimpleNamespace(config=config, **found)
    results = read_results(path.parent)
    gates = judge_gate(session, results), judge_stages(session, results)
    return [(gate.model_dump_json(), [*map(issue_sentence, gate.issues)]) for gate in gates]


def answered(name: str, path: Path) -> None:
    """Send bytes to an endpoint over one connection; every request gets one answer, and none is a 500."""
    loop, site = endpoint(name)
    asyncio.run_coroutine_threadsafe(connected(site, path.read_bytes()), loop).result()


@cache
def endpoint(name: str) -> tuple[asyncio.AbstractEventLoop, Any]:
    """Start the front of an endpoint in a loop of its own, in a thread: a test's may run in this one."""
    loop, setup = asyncio.new_event_loop(), Setup(tiny_served(name), replace(http.SETTINGS, timeout=0.1))
    site = Site(setup.front(), setup.metrics, ("localhost",))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    loop.call_soon_threadsafe(site.front.start, loop)
    return loop, site


async def connected(site: Any, data: bytes) -> None:
    """Feed a connection, and then drop it."""
    failures = list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(str(context)))
    connection, transport = Connection(site), Transport()
    connection.connection_made(transport)
    if data:  # the end of a connection is told otherwise
        connection.data_received(data)
    end = time.monotonic() + 1
    while connection.busy and time.monotonic() < end:
        await asyncio.sleep(0.001)
    assert not connection.busy, "a request does not end"
    connection.connection_lost(None)
    assert not failures, failures[0][:200]
    assert not site.posts
    broken = re.search(rb"(?m)^HTTP/1\.1 (?!100|2|4|503).*", transport.written)
    assert not broken, broken
    assert transport.written.startswith(b"HTTP/1.1 ") or not transport.written, bytes(transport.written[:99])


def request(method: str, path: str, body: bytes, headers: dict[str, str], chunks: Any) -> bytes:
    """Return the bytes of a request."""
    given = {"host": "localhost", "content-type": "application/json"}
    given |= {"content-length": str(len(body))} if chunks is None else {"transfer-encoding": "chunked"}
    lines = "".join(f"{key}: {value}\r\n" for key, value in (given | headers).items())
    parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in chunks or () if part]
    sent = bytes(body) if chunks is None else b"".join([*parts, b"0\r\n\r\n"])
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("utf-8", "replace") + sent


def archive(arrays: dict[str, Any]) -> bytes:
    """Return what `numpy.savez` writes."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def engines() -> list[bytes]:
    """Return an engine of backend cuda of one layer, whose cubin holds the names of its kernels alone."""
    plan = cuda.Plan(
        inputs=("input_ids", "attention_mask"),
        tensors={
            "codes": cuda.Tensor(kind="int8", width=32, scale=0.5),
            **{name: cuda.Tensor(kind="fp16", width=32) for name in ("x", "sum", "y")},
        },
        operations=(
            cuda.Embed(name="embed", epsilon=1e-12, typed=False, half="x", codes=("codes",)),
            cuda.Linear(name="dense", input="codes", weight="int8", residual="x", output="sum"),
            cuda.Norm(name="norm", input="sum", epsilon=1e-12, half="y"),
            cuda.Head(name="head", input="y", pooling="mean", steps=(), answers=(cuda.Answer(name="z"),)),
        ),
    )
    listed = (row for operation in plan.operations for row in list_arrays(operation, plan, {}))
    arrays: dict[str, Any] = {
        name: np.zeros([size or 2 for size in shape], kind) for name, kind, shape in listed
    }
    for target in map(find_target, NAMES[:-1]):
        assert target is not None
        symbols = "".join(f"\0.text.{name}\0" for name in sorted(list_kernels(plan, target)))
        arrays[f"code.{target.name}.all"] = np.frombuffer(symbols.encode(), np.uint8)
    told = {"version": get_version(), "plan": json.dumps(asdict(plan))}
    return [write_safetensors(arrays, told)]


def odd_engine(samples: list[bytes], chance: random.Random) -> bytes:
    """Return an engine with another header or plan in front of its arrays."""
    size = int.from_bytes(samples[0][:8], "little")
    header, told = json.loads(samples[0][8 : 8 + size]), "__metadata__"
    if chance.random() < 0.5:
        header[told]["plan"] = odd_json([header[told]["plan"].encode()], chance).decode("utf-8", "replace")
    text = json.dumps(header).encode()
    made = text if chance.random() < 0.5 else odd_json([text], chance)
    return len(made).to_bytes(8, "little") + made + samples[0][8 + size :]


def graphs() -> list[bytes]:
    """Return good ONNX files of several forms."""
    return [*(healthy(form).SerializeToString() for form in FORMS), float_layer().SerializeToString()]


def odd_graph(samples: list[bytes], chance: random.Random) -> bytes:
    """Return a graph with parts that no exporter writes."""
    import onnx

    model = onnx.load_from_string(chance.choice(samples))
    with contextlib.suppress(Exception):  # it was disfigured beyond what onnx lets one write
        disfigure(model, chance)
    for node in model.graph.node:
        if chance.random() < 0.03:
            node.domain = chance.choice(["com.microsoft", "ai.onnx", "other"])
        if chance.random() < 0.03:
            del node.output[chance.randrange(len(node.output) + 1) :]
    model.opset_import.extend(onnx.helper.make_opsetid(name, 1) for name in ("com.microsoft", "other"))
    return model.SerializeToString()


def odd_json(samples: list[bytes], chance: random.Random) -> bytes:
    """Return JSON with other values, keys and lengths."""
    value = json.loads(chance.choice(samples))
    for _ in range(chance.randint(1, 4)):
        value = http.mutated(value, chance)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def odd_request(name: str, samples: list[bytes], chance: random.Random) -> bytes:
    """Return one to three requests that a client could mean."""
    path = "/v1/" + name.split(maxsplit=1)[0]
    return b"".join(
        request(*http.draw_request(http.GOOD[name], path, chance)) for _ in range(chance.choice([1, 1, 3]))
    )


def of_docs(pattern: str) -> list[bytes]:
    """Return files of measured runs."""
    return [path.read_bytes() for path in sorted((ROOT / "docs").glob(pattern))[:3]]


def as_json(value: object) -> list[bytes]:
    return [json.dumps(value).encode()]


MODULES = [
    {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for n, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("", "Normalize")])
]
POOLING, MEAN = "1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
CONFIG = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32,
    "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64, "hidden_act": "gelu",
    "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}, "torch_dtype": "float32",
}  # fmt: skip
CALIBRATION = {
    "method": "max", "seed": 0, "data": {"samples": 8}, "notes": [], "softmax": [],
    "quantizers": {"a.input_quantizer": {"kind": "input", "axis": None, "amax": 1.5, "rms": 0.5}},
}  # fmt: skip
LOGITS = {"validation.logits": np.zeros((9, 2), np.float32), "validation.labels": np.zeros(9, int)}
FEEDS = {"x": np.zeros((2, 4, 32), np.float32), "mask": np.zeros((2, 1, 1, 4), np.float32)}
CARD = b"---\nlicense: apache-2.0\nlicense_name: own\ntags:\n- a\n---\n# Model\n"
TARGETS: dict[str, Target] = {
    "check": Target(lambda path: json.dumps(to_json(check_file(path)), allow_nan=False), graphs, odd_graph),
    "fix": Target(rewritten, graphs, odd_graph),
    "samples": Target(lambda path: read_feeds(path, float_layer()), lambda: [archive(FEEDS)]),
    "recipe": Target(
        lambda path: load_recipe(str(path)),
        lambda: [read_source(name, load_recipe(name))[1].encode() for name in shipped_recipes()],
        file="file.yaml",
    ),
    "gate": Target(judged, lambda: of_docs("measured/report/results.json"), odd_json, RESULTS_FILE,
                   {"logits/fp32.npz": lambda: archive(LOGITS)}),
    "bench": Target(read_bench, lambda: of_docs("measured/benches/*.json"), odd_json),
    "engine record": Target(
        lambda path: read(path, EngineResult, "engine record", "build it again"),
        lambda: [engine_result(12).model_dump_json().encode()],
        odd_json,
    ),
    "engine": Target(read_file, engines, odd_engine),
    "calibration": Target(read_record, lambda: as_json(CALIBRATION), odd_json),
    "model config": Target(
        lambda path: read_class_names(str(path.parent), None, CLASSIFICATION),
        lambda: as_json(CONFIG), odd_json, "config.json",
    ),
    "model modules": Target(
        lambda path: embedding_notes(str(path.parent), None, 128, ()),
        lambda: as_json(MODULES), odd_json, "modules.json", {POOLING: lambda: as_json(MEAN)[0]},
    ),
    "model pooling": Target(
        lambda path: choose_prompts(str(path.parents[1]), None, (), 2),
        lambda: as_json(MEAN), odd_json, POOLING, {"modules.json": lambda: as_json(MODULES)[0]},
    ),
    "model card": Target(lambda path: find_license(str(path.parent), None), lambda: [CARD], file="README.md"),
    **{
        f"rows {kind}": Target(
            lambda path: load_split(GLUE["sst2"], str(path), "validation"),
            lambda made=made: [made],
            file=f"file.{kind}",
        )
        for kind, made in {
            "csv": b"sentence,label\n" + b'"a, good film",1\nbad,0\n' * 9,
            "jsonl": b'{"sentence": "a good film", "label": 1}\n{"sentence": "bad", "label": 0}\n' * 9,
        }.items()
    },
    "arrays": Target(lambda path: read_arrays(path, "write it again"), lambda: [archive(LOGITS)]),
    "answers": Target(read_answers, lambda: [archive(LOGITS)]),
    "cache": Target(read_cache_file, BASES["cache"]),
    "profile": Target(read_profile, BASES["profile"], odd_json),
    **{
        f"diagnose {kind}": Target(
            lambda path: json.dumps(diagnose([path]).model_dump(mode="json"), allow_nan=False),
            base,
            {"onnx": odd_graph, "table": odd_json, "profile": odd_json}.get(kind),
        )
        for kind, base in BASES.items()
    },
    **{
        f"http {name}": Target(
            partial(answered, name),
            lambda name=name: [
                request("POST", "/v1/" + name.split()[0], json.dumps(http.GOOD[name]).encode(), {}, None),
                request("GET", "/v1/model", b"", {}, None),
            ],
            partial(odd_request, name),
        )
        for name in http.TASKS
    },
}  # fmt: skip


def cases(target: Target, seed: int) -> Iterator[bytes]:
    """Yield damaged files, of which half are well-formed ones with odd parts where these can be made."""
    chance, samples = random.Random(seed), target.samples()
    for data in broken(samples, 1 << 40, seed):
        yield target.odd(samples, chance) if target.odd and chance.random() < 0.5 else data


def fault_of(reader: Reader, path: Path, data: bytes) -> str:
    """Return how a reader breaks on these bytes: not our exception, a long sentence, time, or memory."""
    path.write_bytes(data)
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGPROF, signal.default_int_handler)  # Ctrl-C ends every reader
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        reader(path)
    except QdqError as error:
        if "\n" in str(error) or len(str(error)) > 5_000:
            return f"no sentence: {str(error)[:200]!r}"
    except KeyboardInterrupt:
        if time.process_time() - start < SECONDS / 2:
            raise
        return f"over {SECONDS} s"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10
    return f"over {MEGABYTES} MB" if grown > MEGABYTES else ""


def shortened(reader: Reader, path: Path, data: bytes, fault: str, until: float) -> bytes:
    """Remove parts of a case while it breaks in the same way."""
    size = len(data) // 2
    while size and time.monotonic() < until:
        place = 0
        while place < len(data) and time.monotonic() < until:
            shorter = data[:place] + data[place + size :]
            if fault_of(reader, path, shorter).partition(": ")[0] == fault.partition(": ")[0]:
                data = shorter
            else:
                place += size
        size //= 2
    return data


def search(name: str, seed: int, seconds: float, known: set[str]) -> int:
    """Look for faults of one reader, every kind once, beside those that are known; returns the cases."""
    target, until, count = TARGETS[name], time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        path = target.place(Path(folder))
        for data in cases(target, seed):
            if time.monotonic() > until:
                break
            count += 1
            fault = fault_of(target.read, path, data)
            if fault and (kind := fault.partition(": ")[0]) not in known:
                shortest = shortened(target.read, path, data, fault, time.monotonic() + 30)
                print(f"{name}, seed {seed}: {fault}\n  {shortest[:2000]!r}", flush=True)
                known.add(kind)
                row = {"target": name, "fault": kind, "data": base64.b64encode(shortest).decode()}
                found = json.loads(FOUND.read_text()) if FOUND.exists() else []
                FOUND.write_text(json.dumps([*found, row], indent=1) + "\n")
    return count


def main() -> None:
    """Go over the targets in rounds until the time is over."""
    raw = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    options.add_argument("targets", nargs="*", choices=[*TARGETS, []], default=[])
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--seed", type=int, default=int(time.time()))
    given = options.parse_args()
    names, seed, counts = given.targets or [*TARGETS], given.seed, Counter[str]()
    until, faults = time.monotonic() + 60 * given.minutes, defaultdict[str, set[str]](set)
    while time.monotonic() < until:
        for name in names:
            seconds = min(until - time.monotonic(), ROUND_S, 60 * given.minutes / len(names))
            counts[name] += search(name, seed, seconds, faults[name])
        seed += 1
    for name, count in counts.items():
        print(f"{name}: {count} cases, {len(faults[name])} faults")
    print(f"seeds {given.seed} to {seed - 1}, {sum(os.times()[:4]):.0f} s of CPU", flush=True)
    sys.exit(any(faults.values()))


if __name__ == "__main__":
    main()
