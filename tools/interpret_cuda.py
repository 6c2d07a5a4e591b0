"""Measure a run's plan of CUDA kernels without a GPU: its interpreter against ONNX Runtime on the same file.

python tools/interpret_cuda.py RUN [--rows 200]

RUN is a folder of `qdqbench run` with a CPU backend; the rows are the first ones of the evaluation.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import onnx

from qdqbench.eval.metrics.runners import session_of
from qdqbench.quantize.engine.cuda.interpret import interpret
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.pipeline.graphs import graph_path
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.tasks.rows import sorted_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--rows", type=int, default=200, help="rows of each split")
    asked = parser.parse_args()
    session = Session(read_config(asked.run), asked.run)
    graph = onnx.load(graph_path(session))
    plan, arrays = pack(match_graph(graph))
    runtime = session_of(graph.SerializeToString(), "the graph")
    for name, (_, whole) in session.eval_splits.items():
        encoded = whole.part(np.arange(min(asked.rows, len(whole.gold))))
        answers: dict[str, list[np.ndarray]] = {"interpreter": [], "ONNX Runtime": []}
        order, started = [], time.perf_counter()
        for rows, padded in sorted_batches(encoded, 32, pad_id=session.pad_id):
            batch = {key: padded[key] for key in plan.inputs}
            answers["interpreter"].append(interpret(plan, arrays, batch)["logits"])
            answers["ONNX Runtime"].append(runtime.run(None, batch)[0])
            order.append(rows)
        back = np.argsort(np.concatenate(order))
        logits = {key: np.concatenate(found)[back] for key, found in answers.items()}
        for key, found in logits.items():
            print(name, key, f"accuracy {(found.argmax(1) == encoded.gold).mean():.4f}")
        ours, theirs = logits.values()
        print(
            f"{len(ours)} rows, {(ours.argmax(1) != theirs.argmax(1)).sum()} other answers, mean difference "
            f"of logits {np.abs(ours - theirs).mean():.4f}, {time.perf_counter() - started:.1f} s"
        )


if __name__ == "__main__":
    main()
