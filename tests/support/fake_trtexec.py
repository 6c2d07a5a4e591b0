"""A trtexec that takes the options of the real one and writes its files, by hand from the documented formats.

No real trtexec wrote what it writes: answers are ONNX Runtime's, kernels and times are made up.
"""

import math
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import onnx

from qdqbench.quantize.core.results import LayerRow

from .layer_tables import inspector_json

SHAPES = ("--profile", "--minShapes", "--optShapes", "--maxShapes")
BUILD = {
    "--onnx",
    "--stronglyTyped",
    "--profile",
    "--minShapes",
    "--optShapes",
    "--maxShapes",
    "--dumpLayerInfo",
}
BUILD |= {"--profilingVerbosity", "--exportLayerInfo", "--timingCacheFile", "--saveEngine", "--skipInference"}
RUN = {"--loadEngine", "--useProfile", "--shapes", "--loadInputs", "--iterations", "--duration", "--warmUp"}
RUN |= {"--exportOutput", "--exportTimes", "--exportProfile", "--useCudaGraph", "--noDataTransfers"}
RUN |= {"--useSpinWait", "--separateProfileRun", "--profilingVerbosity"}
LOG = """&&&& RUNNING TensorRT.trtexec [TensorRT v101600] [b72] # trtexec {options}
[11/22/2026-10:00:00] [I] === Device Information ===
[11/22/2026-10:00:00] [I] Selected Device: NVIDIA L4
[11/22/2026-10:00:00] [I] Compute Capability: 8.9
[11/22/2026-10:00:00] [I] TensorRT version: 10.16.0
[11/22/2026-10:00:09] [I] Engine built in 8.5 sec.
&&&& PASSED TensorRT.trtexec [TensorRT v101600] [b72] # trtexec {options}
"""
MS = {"int8": 0.5, "fp16": 1.0, "fp32": 2.0}


def run_script(script: Path, folder: Path) -> list[list[str]]:
    """Run a script with a trtexec that notes how it is called; the calls."""
    fake, calls = folder / "trtexec", folder / "calls"
    fake.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" '' >> {calls}\n")
    fake.chmod(0o755)
    calls.write_text("")
    subprocess.run(["sh", script], env=os.environ | {"TRTEXEC": str(fake)}, check=True, timeout=60)
    return [each.split("\n") for each in calls.read_text().removesuffix("\n\n").split("\n\n")]


class Trtexec:
    """Does what trtexec is called to do in a folder.

    Args:
        wrong: changes each answer.
        not_int8: GEMMs that do not run in INT8.
    """

    def __init__(self, folder: Path, *, wrong=lambda answers: answers, not_int8=()) -> None:
        self.folder, self.wrong, self.not_int8 = folder, wrong, not_int8
        self.profiles: dict[str, dict] = {}
        self.sessions: dict[str, object] = {}

    def __call__(self, call: list[str]) -> None:
        options: dict[str, list[str]] = {}
        for word in call:
            name, _, value = word.partition("=")
            options.setdefault(name, []).append(value)
        known = BUILD if "--onnx" in options else RUN
        assert options.keys() <= known, options.keys() - known
        if "--onnx" in options:
            assert all(len(value) == 1 for name, value in options.items() if name not in SHAPES)
            self.build({name: value[0] for name, value in options.items()}, call)
        else:
            assert all(len(value) == 1 for value in options.values())
            self.run({name: value[0] for name, value in options.items()})

    def build(self, options, call):
        assert "--stronglyTyped" in options
        assert options["--profilingVerbosity"] == "detailed"
        engine = options["--saveEngine"]
        graph = (self.folder / options["--onnx"]).resolve()
        profiles, number = {}, None
        for name, _, value in (word.partition("=") for word in call):
            if name == "--profile":
                number = int(value)
                profiles[number] = {}
            elif name in SHAPES:
                profiles[number][name] = shapes_of(value)
        assert all(set(each) == set(SHAPES[1:]) for each in profiles.values())
        (self.folder / engine).write_text(str(graph))
        self.profiles[engine] = profiles
        rows = rows_of(onnx.load(graph), self.not_int8)
        (self.folder / options["--exportLayerInfo"]).write_text(inspector_json(rows, schema=10))
        stem = engine.removesuffix(".engine")
        (self.folder / f"{stem}.log").write_text(LOG.format(options=" ".join(call)))

    def run(self, options):
        import onnxruntime as ort

        engine, shapes = options["--loadEngine"], shapes_of(options["--shapes"])
        profile = self.profiles[engine][int(options["--useProfile"])]
        for name, shape in shapes.items():
            low, high = profile["--minShapes"][name], profile["--maxShapes"][name]
            assert all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        feeds = {}
        for name, _, path in (pair.rpartition(":") for pair in options["--loadInputs"].split(",")):
            feeds[name] = np.fromfile(self.folder / path, "<i8").reshape(shapes[name])
        if "--exportTimes" in options:
            self.times(options, engine.removesuffix(".engine"), next(iter(shapes.values()))[0])
            return
        if engine not in self.sessions:
            graph = (self.folder / engine).read_text()
            self.sessions[engine] = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
        session = self.sessions[engine]
        names = [each.name for each in session.get_outputs()]
        answers = zip(names, session.run(names, feeds), strict=True)
        texts = [
            f'{{ "name" : "{name}"\n  , "dimensions" : "{"x".join(map(str, made.shape))}"\n'
            f'  , "values" : [ {", ".join(f"{value:.6g}" for value in made.ravel())} ]\n  }}\n'
            for name, made in ((name, self.wrong(made)) for name, made in answers)
        ]
        (self.folder / options["--exportOutput"]).write_text("[\n  " + ", ".join(texts) + "]\n")

    def times(self, options, graph, batch):
        ms, rows, start = MS[graph] * math.sqrt(batch), [], 500.0
        for number in range(240):
            took = ms * (1 + 0.01 * (number % 7))
            enqueued, ended = start - 0.1, start + took
            fields = {"startEnqMs": enqueued, "endEnqMs": start, "startH2dMs": start, "endH2dMs": start}
            fields |= {"startComputeMs": start, "endComputeMs": ended, "startD2hMs": ended, "endD2hMs": ended}
            fields |= {"h2dMs": 0, "computeMs": took, "d2hMs": 0, "latencyMs": took}
            rows.append(
                "{ " + ", ".join(f'"{name}" : {value:.6g}' for name, value in fields.items()) + " }\n"
            )
            start = ended
        (self.folder / options["--exportTimes"]).write_text("[\n  " + ", ".join(rows) + "]\n")
        kernel = (
            f'{{ "name" : "all", "timeMs" : {240 * ms:.6g}, "averageMs" : {ms:.6g}, "percentage" : 100 }}'
        )
        (self.folder / options["--exportProfile"]).write_text(f'[\n  {{ "count" : 240 }}\n, {kernel}\n]\n')


def shapes_of(text):
    found = {}
    for pair in text.split(","):
        name, _, sizes = pair.rpartition(":")
        assert re.fullmatch(r"\d+(x\d+)*", sizes)
        found[name] = [int(size) for size in sizes.split("x")]
    return found


def rows_of(model, not_int8):
    """A kernel for each GEMM: in INT8 where both of its inputs come from DequantizeLinear."""
    makers = {name: node for node in model.graph.node for name in node.output}

    def dequantized(name):
        node = makers.get(name)
        while node is not None and node.op_type in ("Transpose", "Cast", "Reshape"):
            node = makers.get(node.input[0])
        return node is not None and node.op_type == "DequantizeLinear"

    rows = []
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            int8 = node.name not in not_int8 and all(map(dequantized, node.input[:2]))
            kind = "Int8" if int8 else "Half"
            rows.append(
                LayerRow(
                    name=f"{node.name}_myl0_{len(rows)}",
                    kind="gemm",
                    onnx=[node.name],
                    inputs=[kind],
                    constants=[],
                    outputs=["Half"],
                )
            )
    return rows
