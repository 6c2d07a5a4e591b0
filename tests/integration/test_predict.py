"""Files through a run's engine: `predict` as a user calls it, in several processes, killed, and by Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from qdqbench.quantize.pipeline.session import Session, read_config

from .served import evaluated, value_of, with_cpu_engine
from .tiny import MAIN, fine, refused, sentences

ROWS = 40


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory):
    return with_cpu_engine(finished_run, tmp_path_factory.mktemp("predict") / "run")


def eval_rows(run):
    split, _ = Session(read_config(run), run).eval_splits["validation"]
    return split.dataset.data.table.combine_chunks()


def read(path):
    return pa.parquet.read_table(path).to_pydict()


def test_a_file_is_answered_as_the_run_was(run, tmp_path, qdqbench):
    table = eval_rows(run).slice(0, ROWS)
    pa.csv.write_csv(table, tmp_path / "rows.csv")
    out = tmp_path / "out.parquet"
    done = fine(qdqbench("predict", run, "--data", tmp_path / "rows.csv", "--out", out, "--json"))
    made, told = read(out), json.loads(done.out)
    assert (told["rows"], told["resumed"], told["unanswered"]) == (ROWS, 0, 0)
    assert [*made] == told["columns"] == ["sentence", "label", "predicted_label", "predicted_scores"]
    assert made["sentence"] == table.column("sentence").to_pylist()
    shares = [value_of({"scores": each}) for each in made["predicted_scores"]]
    np.testing.assert_allclose(shares, evaluated(run, ROWS), atol=2e-2)
    refused(qdqbench("predict", run, "--data", tmp_path / "rows.csv", "--out", out), "exists; give another")
    options = ["--limit", "3", "--keep", "label", "--overwrite", "--processes", "2", "--threads", "1"]
    done = fine(qdqbench("predict", run, "--data", tmp_path / "rows.csv", "--out", out, *options))
    assert "3 rows" in done.out
    assert [*read(out)] == ["label", "predicted_label", "predicted_scores"]
    assert read(out)["predicted_label"] == made["predicted_label"][:3]


def test_a_run_that_changed_answers_nothing(run, finished_run, tmp_path, qdqbench):
    copy = with_cpu_engine(finished_run, tmp_path / "copy")
    engine = copy / "engine" / "model.engine"
    engine.write_bytes(engine.read_bytes()[:-1] + b"?")
    (tmp_path / "rows.txt").write_text("a good film\n")
    call = ["predict", copy, "--data", tmp_path / "rows.txt", "--out", tmp_path / "out.parquet"]
    refused(qdqbench(*call), "model.engine")
    refused(qdqbench("predict", run, *call[2:4], "--out", tmp_path / "out.csv"), "no .parquet file")
    refused(qdqbench("predict", run, *call[2:], "--prompt", "query: "), "--prompt is for embeddings")
    refused(qdqbench("predict", finished_run, *call[2:]), "CUDA|GPU", code=3)
    (tmp_path / "rows.txt").write_bytes(b"\xff\n")
    refused(qdqbench("predict", run, *call[2:]), "cannot read .*rows.txt as text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "rows.txt"]


def write_many(folder, rows=60_000):
    texts = sentences(500, 1)[0]
    table = pa.table({"id": [*range(rows)], "sentence": [texts[row % 500] for row in range(rows)]})
    pa.parquet.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.long
def test_a_killed_call_of_several_processes_resumes(run, tmp_path):
    data, out = write_many(tmp_path), tmp_path / "out.parquet"
    words = ["predict", run, "--data", data, "--out", out, "--processes", "2", "--threads", "1", "--json"]
    call = [sys.executable, "-c", MAIN, *map(str, words)]
    for kill in (2, 4):
        with subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while len([*tmp_path.glob("out.parquet.parts/*.parquet")]) < kill and process.poll() is None:
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
        assert not out.exists()
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert (told["rows"], told["resumed"] >= 4 * 4096) == (60_000, True)
    made = read(out)
    assert made["id"] == [*range(60_000)]
    assert made["predicted_label"][:500] == made["predicted_label"][500:1000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "rows.parquet"]


RAY = """
import os, sys, time
import qdqbench, ray
import pyarrow as pa

class Watched(qdqbench.Predictor):
    def __init__(self, seen, **given):
        super().__init__(**given)
        self.seen = seen

    def __call__(self, table):
        open(os.path.join(self.seen, str(os.getpid())), "w").close()
        time.sleep(0.3)
        return super().__call__(table)

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)  # two of them read and write
ray.data.DataContext.get_current().execution_options.preserve_order = True
ray.data.read_parquet(sys.argv[1], override_num_blocks=8).map_batches(
    Watched,
    fn_constructor_kwargs={"run": sys.argv[2], "threads": 1, "seen": sys.argv[3]},
    batch_format="pyarrow",
    batch_size=1000,
    compute=ray.data.ActorPoolStrategy(size=2),
    num_cpus=1,
).write_parquet(sys.argv[4])
"""


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'qdqbench[ray]'")
def test_ray_answers_every_row_once_though_a_worker_is_killed(run, tmp_path):
    data, seen, out = write_many(tmp_path, 12_000), tmp_path / "seen", tmp_path / "out"
    seen.mkdir()
    call = [sys.executable, "-c", RAY, str(data), str(run), str(seen), str(out)]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while not (workers := [*seen.iterdir()]) and process.poll() is None:
            time.sleep(0.05)
        os.kill(int(workers[0].name), signal.SIGKILL)
        told, _ = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert len([*seen.iterdir()]) > 1
    made = pa.parquet.read_table(out).sort_by("id").to_pydict()
    assert made["id"] == [*range(12_000)]
    assert made["predicted_label"][:500] == made["predicted_label"][500:1000]
    assert None not in made["predicted_label"]
