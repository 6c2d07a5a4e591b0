"""A run of MiniLM on SST-2 and what can become of it; every number is invented."""

from types import SimpleNamespace

from qdqbench.eval.metrics.results import (
    ChangedPrediction,
    ChangedPredictions,
    Classes,
    ClassRow,
    Gate,
    GateIssue,
    LayerError,
    LayerErrors,
    Parity,
    ParityRow,
    StageResult,
)
from qdqbench.eval.runs.gate import judge_gate
from qdqbench.eval.runs.report.report import write_reports
from qdqbench.eval.runs.results import ModelChange, Results
from qdqbench.eval.verification.results import Verification
from qdqbench.quantize.calibration.record import QuantizerRow
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.lint.findings import FindingRow
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.tasks.task import GLUE

from .pages import HOSTILE
from .records import comparison, engine_result, sample_of

LINEARS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)


GARBLED = f"{HOSTILE} \ud800"  # cannot be encoded


def kernels(layer, prefix):
    """Kernels of one layer as TensorRT-RTX writes them: each GEMM, then a kernel that scales its result."""
    base = f"/{prefix.replace('.', '/')}/layer.{layer}"

    def row(name, kind, nodes, inputs, outputs):
        return LayerRow(
            name=name,
            kind=kind,
            onnx=[f"{base}/{node}" for node in nodes],
            inputs=inputs.split(),
            constants=["Int8", "Float", "Float"] if kind == "gemm" else ["Half", "Float"],
            outputs=outputs.split(),
        )

    qkv = [f"attention/self/{name}/MatMul" for name in ("query", "key", "value")]
    rows = [row("+".join(f"{base}/{node}" for node in qkv) + "_myl0_1", "gemm", qkv, "Int8", "Float")]
    rows += [row("__myl_MulCastAddReshTran_myl0_4", "kgen", [node], "Float", "Half") for node in qkv]
    products = ["attention/self/MatMul_1", "attention/self/Softmax", "attention/self/MatMul"]
    rows.append(row("_gemm_mha_v2_myl0_2", "kgen", products, "Half Half Half Half", "Int8"))
    for node in ("attention/output/dense/MatMul", "intermediate/dense/MatMul", "output/dense/MatMul"):
        rows.append(row(f"{base}/{node}_myl0_3", "gemm", [node], "Int8", "Float"))
        rows.append(row("__myl_MulCastAddReshAddCast_myl0_5", "kgen", [node], "Half Float", "Half Int8"))
    return rows


def engine(layers, prefix):
    table = [row for layer in range(layers) for row in kernels(layer, prefix)]
    half = {name: ["Half"] for name in ("inputs", "constants", "outputs")}
    for node in ("/bert/pooler/dense/Gemm", "/classifier/Gemm"):
        table.append(LayerRow(name="__myl_FcAddTanh_myl0_6", kind="runtime_fusion", onnx=[node], **half))
    return engine_result(6 * layers, attention_fused=layers, layers=table)


def built(**changes):
    return engine(6, "bert.encoder").model_copy(update=changes)


def finding(**changes):
    return FindingRow.model_validate(sample_of("finding", **changes))


def parity_row(name, values, differing, step=1, error=None):
    counts = {"int8_values": values, "differing": differing, "max_step": step}
    return ParityRow(name=name, output_rel_error=error, **counts)


def parity_of(rows):
    return Parity(rows=rows, passed=all(row.holds for row in rows), **sample_of("parity"))


def measured(metrics, delta, within_noise=True):
    """A scored stage; `delta` is its distance from FP32."""
    versus = delta is not None and comparison(
        dict.fromkeys(metrics, delta), 0.0021, within_noise=within_noise
    )
    errors = dict.fromkeys(metrics, 0.0103)
    detail = "torch 2.13, CPU"
    return StageResult(
        status="done", metrics=metrics, stderr=errors, n=872, vs_fp32=versus or None, detail=detail
    )


def sample(layers=6, prefix="bert.encoder", **changes):
    """A run of MiniLM on SST-2 without a GPU, with every section filled."""
    modules = [f"{prefix}.layer.{layer}.{name}" for layer in range(layers) for name in LINEARS]
    quantizers = []
    for index, module in enumerate(modules):
        layer, name = divmod(index, 6)
        shared = 0 if name < 3 else name  # query, key and value read the same tensor
        weight = {"axis": 0, "amax": 0.4 + 0.01 * index, "amax_min": 0.05, "amax_over_rms": None}
        outliers = 14 + (60 / (1 + layer) if name == 4 else 3 * shared)
        amax = 3.2 + 1.7 * shared + 0.6 * ((layer * 5) % 4)
        read = {
            "axis": None,
            "amax": amax,
            "amax_min": 3.2,
            "amax_over_rms": outliers,
            "amax_spread": 0.01 * name,
        }
        for kind, values in (("input", read), ("weight", weight)):
            path = f"{module}.{kind}_quantizer"
            quantizers.append(QuantizerRow(name=path, module=module, kind=kind, **values))
    rows = [
        parity_row(module, 1_048_576, (index * 997) % 2400, error=0.0004 + 0.00001 * index)
        for index, module in enumerate(modules)
    ]
    skipped = "no GPU on this machine; copy the engine to one and run qdqbench evaluate there"
    fields = sample_of(
        "run",
        quantized_layers=modules,
        quantizers=quantizers,
        findings=[finding()],
        parity=parity_of(rows),
        stages={
            "fp32": measured({"accuracy": 0.8968}, None),
            "fake_quant": measured({"accuracy": 0.8979}, 0.0011),
            "onnxruntime": measured({"accuracy": 0.8956}, -0.0012),
            "engine": StageResult(status="skipped", reason=skipped),
        },
        engine=engine(layers, prefix),
    )
    return Results.model_validate(fields | changes)


def mnli():
    base = {"accuracy": 0.8421, "accuracy_mm": 0.8466}
    int8 = {"accuracy": 0.8387, "accuracy_mm": 0.8441}
    stages = {"fp32": measured(base, None), "onnxruntime": measured(int8, -0.0034, within_noise=False)}
    return sample(task={"name": "mnli"}, stages=stages)


def regression():
    stages = {
        "fp32": measured({"pearson": 0.8662, "spearman": 0.8639}, None),
        "onnxruntime": measured({"pearson": 0.8588, "spearman": 0.8579}, -0.0074, within_noise=False),
    }
    versus = stages["onnxruntime"].vs_fp32
    assert versus is not None
    versus.disagreements = versus.mcnemar_p = versus.sqnr_db = versus.sqnr_db_stderr = None
    return sample(task={"name": "stsb"}, stages=stages)


def failed():
    wrong = built()
    node = "/bert/encoder/layer.2/intermediate/dense/MatMul"
    for row in wrong.layers:
        if node in row.onnx and row.kind == "gemm":
            row.kind, row.name, row.outputs = "runtime_fusion", "__myl_CastMulFcMul_myl0_3", ["Half"]
    wrong.int8_gemms, wrong.not_int8 = 35, [node]
    numbers = {"value": 0.031, "stderr": 0.01, "limit": 0.01}
    drop = GateIssue(code="accuracy", state="failed", stage="onnxruntime", metric="accuracy", **numbers)
    lost = GateIssue(code="require_int8", state="failed", names=[node], detail=f"not in INT8: {node}")
    stages = sample().stages | {"onnxruntime": measured({"accuracy": 0.8658}, -0.031, within_noise=False)}
    return sample(stages=stages, engine=wrong, gate=Gate(passed=False, max_drop=0.01, issues=[drop, lost]))


def without_engine():
    skipped = StageResult(status="skipped", reason="tensorrt_rtx is not installed")
    stages = sample().stages | {"engine": skipped}
    return sample(stages=stages, engine=None, changed_predictions=changed([]))


def bare():
    """Nothing but FP32: the rest did not run."""
    skipped = {name: StageResult(status="skipped", reason="--only fp32") for name in ("fake_quant", "engine")}
    return sample(
        stages={"fp32": measured({"accuracy": 0.8968}, None)} | skipped,
        recipe={},
        quantized_layers=[],
        quantizers=[],
        files=[],
        findings=[],
        parity=None,
        engine=None,
        timings={},
        warnings=[],
        environment={},
    )


def unscored():
    return sample(stages=dict.fromkeys(("fp32", "engine"), StageResult(status="skipped", reason="no labels")))


def long_names():
    return sample(24, "a_wrapper_with_a_very_long_name.and_another_module_inside_it.xlm_roberta.encoder")


def poisoned(value, key=""):
    """Every string of a JSON value is an attack."""
    if isinstance(value, str):
        return value if key in {"status", "kind", "severity"} else GARBLED
    if isinstance(value, dict):
        return {name: poisoned(item, name) for name, item in value.items()}
    return [poisoned(item, key) for item in value] if isinstance(value, list) else value


def hostile():
    """Every string of the file is an attack."""

    fields = poisoned(sample().model_dump())
    fields["stages"][GARBLED] = fields["stages"]["onnxruntime"]
    for finding in fields["findings"]:
        finding["effect"] = "note"  # one of a few words: nothing else is read
    for stage in fields["stages"].values():
        stage["metrics"] = dict.fromkeys([GARBLED] if stage["metrics"] else [], 0.9)
        if stage["vs_fp32"]:
            stage["vs_fp32"]["delta"] = {GARBLED: 0.1}
    return Results.model_validate(
        fields | {"environment": {GARBLED: GARBLED}, "timings": {GARBLED: fields["timings"]["build"]}}
    )


OUTPUT = "bert.encoder.layer.{}.output.dense"


def answer(number, change="regressed", **fields):
    words = {"text": f"text {number}", "label": "good", "fp32": "good", "prediction": "bad"}
    known = {"fp32_margin": 0.25, "margin": 0.125, "change": change, "distance": 0.5}
    return ChangedPrediction(sample=number, **(words | known | fields))


def changed(rows, count=None, **counts):
    return ChangedPredictions(
        stage="onnxruntime",
        split="validation",
        prediction_type="class",
        n=872,
        count=len(rows) if count is None else count,
        counts=counts or {"regressed": len(rows)},
        rows=rows,
        file="changed.csv",
    )


def confusion(names=("bad", "good")):
    rows = [
        ClassRow(name=name, n=10, fp32=0.9, recall=0.8, delta=-0.1, delta_stderr=0.05, regressed=1, fixed=0)
        for name in names
    ]
    made = [[8 if a == b else 2 for b in range(len(names))] for a in range(len(names))]
    base = [[9 if a == b else 1 for b in range(len(names))] for a in range(len(names))]
    return Classes(stage="onnxruntime", unit="samples", rows=rows, fp32=base, confusion=made)


def layer_errors():
    linears = [(OUTPUT.format(n), "linear", 0.01 * (n + 1), None) for n in range(4)]
    blocks = [(f"layer.{n}", "block", 0.02, 0.02 * (n + 1)) for n in range(4)]
    names = ("name", "what", "isolated", "cumulative")
    rows = [LayerError(**dict(zip(names, row, strict=True))) for row in linears + blocks]
    return LayerErrors(n=16, rows=rows)


def effects(text="text", **fields):
    rows = [answer(3, text=text, fp32=text), answer(5, "fixed", text=None)]
    given = {
        "changed_predictions": changed(rows, **{"regressed": 1, "fixed": 1}),
        "classes": confusion((text, "good")),
        "layer_errors": layer_errors(),
        "model_changes": [ModelChange(what="tanh GELU", count=6, description=f"GELU {text}")],
    }
    return sample(**(given | fields))


def run_gate(task, max_drop, min_sqnr_db=None, **stages):
    """The gate of a run whose stages have these differences from FP32, and nothing else to fail by."""
    asked = GateSettings(max_drop=max_drop, min_sqnr_db=min_sqnr_db, require_int8=False)
    recipe = SimpleNamespace(gate=asked, quantizes=True)
    session = SimpleNamespace(config=SimpleNamespace(task=GLUE[task]), recipe=recipe)
    nothing = dict.fromkeys(("parity", "verification", "engine"))
    rows = {"fp32": StageResult(status="done")}
    rows |= {name: StageResult(status="done", vs_fp32=versus) for name, versus in stages.items()}
    results = SimpleNamespace(**nothing, findings=[], speed=[], stages=rows)
    return judge_gate(session, results)


def verification(**changes):
    """An engine of two layers that follows its fake-quant model."""
    return Verification.model_validate(sample_of("verification", **changes))


def written(results, folder):
    """Markdown and HTML of a run."""
    write_reports(results, folder)
    markdown, page = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("md", "html"))
    return markdown, page
