"""Reports of `check`, `diagnose`, `fix`, `inspect` and `doctor` on made-up files."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.lint.diagnose import Diagnosis, SourceRow
from qdqbench.quantize.lint.doctor import BackendState, Doctor, Library
from qdqbench.quantize.lint.findings import find
from qdqbench.quantize.lint.fix import EngineRow, FixReport, OutputRow, Outputs
from qdqbench.quantize.lint.inspection import inspect_layers
from qdqbench.quantize.lint.machines import find_machine
from qdqbench.quantize.lint.reports import (
    check_report,
    diagnosis_report,
    doctor_report,
    fix_report,
    inspect_report,
)
from qdqbench.quantize.utils.system.cpu import Cpu
from qdqbench.quantize.utils.system.gpu import Gpu

from .layer_tables import bert
from .tiny_layer import healthy, store, unquantized

PATH = Path("model.onnx")


def checked(every):
    model = healthy("fp16")
    unquantized("/layer/query/input")(model)
    store(model, "/layer/key/input.zero_point", 3)
    return check_report(check_model(model), PATH, every)


def diagnosed():
    findings = [
        find("log-no-kernel", nodes=["{ForeignNode[a]}"], n=1, names="{ForeignNode[a]}", shown=["build.log"]),
        find("half-quantized", nodes=["/layer.0/a/MatMul"], gemms=1, all=7, share=(0.25, "profiled time")),
        find("copies", count=8, all=36, int8=2, layers="layers.json", share=(0.1, "profiled time")),
    ]
    files = [SourceRow(name="build.log", kind="build log", what="of trtexec, TensorRT 8.6.1")]
    return diagnosis_report(
        Diagnosis(files=files, findings=findings, ranked_by="by effect", joined=["a and b by names"])
    )


def fixed():
    after = EngineRow(engine="tensorrt_rtx 1.7", gemms=7, int8_gemms=6, attentions=1, kernels=9)
    numbers = {"before_error": 0.0338, "after_error": 0.0153, "difference": 0.0307, "limit": 0.1}
    logits = OutputRow(name="logits", largest=0.3825, disagreements=0, **numbers)
    return fix_report(
        FixReport(
            file="model.onnx",
            out="fixed.onnx",
            done=["2 masks that FP16 does not hold are -1e4"],
            left=["1 GEMM has no usable scale"],
            findings_before={"uint8": 3},
            findings_after={},
            int8_before=0,
            int8_after=6,
            linears=7,
            outputs=Outputs(inputs="random, seed 0", n=4, rows=[logits], **logits.model_dump()),
            engine_before=EngineRow(engine="tensorrt_rtx 1.7", refused="zero points"),
            engine_after=after,
        )
    )


def inspected(every):
    rows = bert(merged=False, output="Float")
    found = inspect_layers(rows, times={row.name: 0.5 for row in rows[1:]} | {"lost": 1.0})
    found.target = "table.json"
    return inspect_report(found, None, every, "batch 8, 128 tokens")


def machine():
    states = {
        "openvino": BackendState(runs=True, builds=True),
        "tensorrt": BackendState(runs=False, builds=False, why="it is not installed: pip install it"),
        "tensorrt_rtx": BackendState(runs=False, builds=True, why="CUDA shows no GPU here"),
    }
    return doctor_report(
        Doctor(
            qdqbench="0.1.0",
            git="0123456789abcdef",
            python="3.11.7",
            platform="Linux 6.8 x86_64",
            cpu="AMD EPYC",
            cpu_features=["avx2"],
            cores=2,
            gpu=Gpu("NVIDIA L4", "8.9", None),
            memory_bytes=24 << 30,
            memory_free_bytes=20 << 30,
            disk_free_bytes=70 << 30,
            packages={"numpy": "2.4.6", "onnx": "1.23"},
            unmet=["numpy is 1.0: pip install numpy"],
            libraries={name: Library(version="1.7") for name in states} | {"torch": Library(version=None)},
            backends=states,
            auto="openvino",
            hub="not asked",
            machine=find_machine(Gpu("NVIDIA L4", "8.9", None), Cpu("AMD EPYC", 2, ())),
            hazards=["torch 2.11: a fault"],
        )
    )


def dated(make):
    report = make()
    return replace(report, page=replace(report.page, created="2026-07-01T12:00:00+00:00"))


LINTED = {
    name: partial(dated, make)
    for name, make in {
        "check": partial(checked, every=False),
        "check-all": partial(checked, every=True),
        "diagnose": diagnosed,
        "fix": fixed,
        "inspect": partial(inspected, every=False),
        "doctor": machine,
    }.items()
}
