"""Reports of `check`, `diagnose`, `fix`, `inspect` and `doctor` on made-up files."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.lint.diagnose import Diagnosis, SourceRow
from qdqbench.quantize.lint.doctor import Doctor
from qdqbench.quantize.lint.findings import find
from qdqbench.quantize.lint.fix import FixReport
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
from .records import sample_of
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
    return fix_report(FixReport.model_validate(sample_of("fix")))


def inspected(every):
    rows = bert(merged=False, output="Float")
    found = inspect_layers(rows, times={row.name: 0.5 for row in rows[1:]} | {"lost": 1.0})
    found.target = "table.json"
    return inspect_report(found, None, every, "batch 8, 128 tokens")


def machine():
    gpu = Gpu("NVIDIA L4", "8.9", None)
    shown = find_machine(gpu, Cpu("AMD EPYC", 2, ()))
    return doctor_report(Doctor.model_validate(sample_of("doctor", gpu=gpu, machine=shown)))


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
