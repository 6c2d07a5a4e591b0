"""Measure what TensorRT-RTX makes of each ONNX operator and type, for the rules of `check`.

    python tools/measure_operators.py [operators] [attention] [codes]

Writes all tables of `quantize/lint/operators.json`, or those named, in 3 minutes and without a GPU. Files of
an operator come from ONNX's own node tests: the first that an engine is built of decides. All but their first
input are constants, as exporters write it; else none or all are. Attention, and linear layers with each type
of Q/DQ, have forms of their own. The version that is installed is added to those of the file: for others
`pip install --target DIR tensorrt-rtx-cu13==VERSION` and PYTHONPATH=DIR.
"""

import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqbench.quantize.engine.backend import DEFAULT_COMPUTE_CAPABILITY, build_engine, choose_backend
from qdqbench.quantize.lint.operators import label_codes
from qdqbench.quantize.utils.errors import UserError

TABLES = ("operators", "attention", "codes")
FOUND = Path(__file__).parent.parent / "quantize" / "lint" / "operators.json"
TYPES = {"FLOAT": TensorProto.FLOAT, "FLOAT16": TensorProto.FLOAT16, "BFLOAT16": TensorProto.BFLOAT16}
INTEGERS = [f"{sign}INT{bits}" for bits in (8, 16, 4) for sign in ("", "U")]
CODES = (*INTEGERS, "FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT4E2M1", "INT32")
# What this version does not say of an operator: it wants the GPU, or a range of shapes.
UNKNOWN = ("Cuda Runtime", "no optimization profile", "no engine shapes")
SECONDS = 120
CASES = 10  # node tests of an operator that are tried
OPSETS = (20, 23)
HEADS = (8, 12, 16, 20, 24, 64, 256, 264)  # of Attention, whose node tests are smaller than any kernel


def collect() -> dict[str, list[tuple[onnx.ModelProto, list[Any]]]]:
    """Return node tests that are one node each, and their inputs, by operator."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = collect_testcases(None)
    found = defaultdict(list)
    for test in tests:
        nodes = test.model.graph.node
        if len(nodes) == 1 and nodes[0].domain in ("", "ai.onnx") and test.data_sets:
            found[nodes[0].op_type].append((test.model, list(test.data_sets[0][0])))
    for name in ("QuantizeLinear", "DequantizeLinear", "Attention"):  # in tables of their own
        del found[name]
    plain = {name: [case for case in cases if _is_plain(case[0])] for name, cases in found.items()}
    return {name: (plain[name] or found[name])[:CASES] for name in sorted(found)}


def _is_plain(model: onnx.ModelProto) -> bool:
    values = (*model.graph.input, *model.graph.output)
    taken = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
    return all(value.type.tensor_type.elem_type in taken for value in values)


def attention(kind: str, head: int, rank: int, mask: bool, **attributes: Any) -> onnx.ModelProto:
    """Return ONNX's Attention of 4 heads at 32 tokens; q, k and v are [1, 4, 32, S] or [1, 32, 4 * S]."""
    shape = [1, 4, 32, head] if rank == 4 else [1, 32, 4 * head]
    heads = {} if rank == 4 else {"q_num_heads": 4, "kv_num_heads": 4}
    names = ["q", "k", "v", "mask"] if mask else ["q", "k", "v"]
    values = [helper.make_tensor_value_info(name, TYPES[kind], shape) for name in "qkv"]
    values += [helper.make_tensor_value_info("mask", TensorProto.BOOL, [1, 1, 1, 32])] if mask else []
    nodes = [helper.make_node("Attention", names, ["y"], name="attention", **heads, **attributes)]
    out = helper.make_tensor_value_info("y", TYPES[kind], shape)
    graph = helper.make_graph(nodes, "attention", values, [out])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def forms(model: onnx.ModelProto, inputs: Sequence[Any], kind: int) -> Iterator[onnx.ModelProto]:
    """Return a node test in a floating-point type: all but its first input constants, or none, or all."""
    for opset, first in itertools.product(OPSETS, dict.fromkeys((1, len(inputs), 0))):
        made = onnx.ModelProto()
        made.CopyFrom(model)
        made.ir_version, made.opset_import[0].version = 10, min(opset, made.opset_import[0].version)
        for value, array in zip(model.graph.input[first:], inputs[first:], strict=True):
            if isinstance(array, np.ndarray | np.generic):
                made.graph.initializer.append(numpy_helper.from_array(np.asarray(array), value.name))
        del made.graph.input[first:]
        node, least = made.graph.node[0], _least_outputs(model)
        del node.output[least:], made.graph.output[least:]
        _retype(made.graph, kind)
        yield made


def _least_outputs(model: onnx.ModelProto) -> int:
    """Return how many outputs an operator must have: exporters write no others."""
    schema = onnx.defs.get_schema(model.graph.node[0].op_type, model.opset_import[0].version)
    variadic = schema.outputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    return len(model.graph.output) if variadic else max(1, schema.min_output)


def _retype(graph: onnx.GraphProto, kind: int) -> None:
    tensors = [*graph.initializer]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = kind
    for item in (item for node in graph.node for item in node.attribute):
        if item.name in ("to", "dtype") and item.i == TensorProto.FLOAT:
            item.i = kind
        tensors += [item.t] if item.HasField("t") else []
    for tensor in tensors:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(kind))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def linear(activation: str, weight: str, block: int = 0) -> onnx.ModelProto:
    """Return a linear layer in FP32 with Q/DQ of these types on its inputs; none where "" is given.

    Weights have one scale, or one for each `block` rows of a column.
    """
    stored, nodes, operands = list[onnx.TensorProto](), list[onnx.NodeProto](), ["x", "w"]
    for position, kind in enumerate((activation, weight)):
        name = operands[position]
        if not kind and position:
            stored.append(numpy_helper.from_array(np.ones((64, 64), np.float32), name))
        if not kind:
            continue
        code, operands[position] = getattr(TensorProto, kind), f"{name}_dq"
        shape = [64 // block, 64] if block and position else []
        count = 64 * 64 // block if block and position else 1
        scales = np.linspace(0.02, 0.03, count).tolist()  # equal ones would be folded into one
        stored.append(helper.make_tensor(f"{name}_scale", TensorProto.FLOAT, shape, scales))
        stored.append(helper.make_tensor(f"{name}_zero", code, shape, [0] * count))
        parameters = [f"{name}_scale", f"{name}_zero"]
        if position:
            codes = np.random.default_rng(0).integers(0, 8, 64 * 64)
            stored.append(helper.make_tensor(f"{name}_codes", code, [64, 64], codes.tolist()))
        else:
            nodes.append(helper.make_node("QuantizeLinear", [name, *parameters], [f"{name}_codes"]))
        by_block = {"axis": 0, "block_size": block} if shape else {}
        inputs = [f"{name}_codes", *parameters]
        nodes.append(helper.make_node("DequantizeLinear", inputs, operands[position:][:1], **by_block))
    nodes.append(helper.make_node("MatMul", operands, ["y"], name="linear"))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "linear", values[:1], values[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def build(models: Sequence[onnx.ModelProto]) -> tuple[str, str]:
    """Return "taken", the datatype of a GEMM, "refused" or "not told", and the first refusal."""
    backend, refusals = choose_backend("tensorrt_rtx"), list[str]()
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        for model in models:
            try:
                built = build_engine(Path(file.name), backend, [], graph=model.SerializeToString())
            except UserError as error:
                refusals.append(str(error).replace(file.name, ""))
            else:
                gemms = [row for row in built.layers if row.kind == "gemm"]
                types = dict.fromkeys(kind for row in gemms for kind in (*row.inputs, *row.constants[:1]))
                return " x ".join(types) or "taken", ""
    unknown = any(sign in text for text in refusals for sign in UNKNOWN)
    return "not told" if unknown else "refused", refusals[0]


def _work(models: Sequence[onnx.ModelProto], pipe: Any) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1), os.dup2(nothing.fileno(), 2)
    try:
        pipe.send(build(models))
    except Exception as error:
        pipe.send(("not told", f"{type(error).__name__}: {error}"))


def build_apart(models: Sequence[onnx.ModelProto]) -> tuple[str, str]:
    """Build in a process of its own, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_work, args=(models, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else ("not told", "it does not end")
    except EOFError:
        return "not told", "it crashes"
    finally:
        child.kill()
        child.join()


def measure(tables: Collection[str]) -> dict[str, dict[str, str]]:
    """Return what this version makes of each file: "taken" or a GEMM's datatype, "refused", or "not told"."""
    found: dict[str, dict[str, str]] = {table: {} for table in tables}

    def note(table: str, label: str, *models: onnx.ModelProto) -> None:
        told, why = build_apart(models)
        found[table][label] = told if table == "codes" or told in ("refused", "not told") else "taken"
        print(f"{label}: {told} {' '.join(why.split())[:400]}", flush=True)

    for name, cases in collect().items() if "operators" in tables else ():
        for label, kind in TYPES.items():
            note("operators", f"{name} {label}", *(made for case in cases for made in forms(*case, kind)))
    for form in itertools.product(TYPES, HEADS, (3, 4), (True, False)) if "attention" in tables else ():
        note("attention", attention_label(*form), attention(*form))
    for codes in list_codes() if "codes" in tables else ():
        note("codes", codes_label(*codes), linear(*codes))
    return found


def attention_label(kind: str, head: int, rank: int, mask: bool) -> str:
    """Return the name of a row."""
    return f"{kind}, heads of {head}, rank {rank}{', mask' * mask}"


def list_codes() -> Iterator[tuple[str, str, int]]:
    """Return types of activation and weight ("": no Q/DQ), and the block of a weight's scales."""
    for kind in CODES:
        pairs = dict.fromkeys(((kind, kind), (kind, "INT8"), ("INT8", kind), ("", kind)))
        yield from ((*pair, block) for pair in pairs for block in (0, 32) if not block or pair[1] == kind)


def codes_label(activation: str, weight: str, block: int) -> str:
    """Return the name of a row."""
    return label_codes([activation or "float", weight], block > 0)


def merge(known: dict[str, Any], version: str, found: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return the tables with one version measured again: by label and outcome the versions that have it."""
    numbers = {text: [*map(int, text.split("."))] for text in {version, *known.get("versions", ())}}
    versions = sorted(numbers, key=lambda text: numbers[text])
    tables = known | {"compute_capability": DEFAULT_COMPUTE_CAPABILITY, "versions": versions}
    for table, rows in found.items():
        before, tables[table] = known.get(table, {}), {}
        for label in {*rows, *before}:
            outcomes = {told: {*those} - {version} for told, those in before.get(label, {}).items()}
            if label in rows:
                outcomes.setdefault(rows[label], set()).add(version)
            kept = {told: sorted(those, key=versions.index) for told, those in outcomes.items() if those}
            tables[table][label] = kept
    return tables


def write(tables: dict[str, Any]) -> None:
    """Write a row a line: "all" stands for all versions, an operator without a type for all types."""
    lines = []
    for key, value in tables.items():
        if key in ("compute_capability", "versions"):
            lines.append(f' "{key}": {json.dumps(value)}')
            continue
        short = {
            label: {told: "all" if those == tables["versions"] else those for told, those in row.items()}
            for label, row in value.items()
        }
        for name in dict.fromkeys(label.split(" ")[0] for label in short) if key == "operators" else ():
            typed = [f"{name} {kind}" for kind in TYPES]
            if all(short.get(label) == short[typed[0]] for label in typed):
                short[name] = short[typed[0]]
                short = {label: row for label, row in short.items() if label not in typed}
        rows = [f"  {json.dumps(label)}: {json.dumps(short[label])}" for label in sorted(short)]
        lines.append(f' "{key}": {{\n' + ",\n".join(rows) + "\n }")
    FOUND.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read() -> dict[str, Any]:
    """Read what `write` wrote, with every version and type."""
    tables: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for name in [label for label in tables.get("operators", ()) if " " not in label]:
        row = tables["operators"].pop(name)
        tables["operators"] |= {f"{name} {kind}": dict(row) for kind in TYPES}
    for table in tables.values():
        for row in table.values() if isinstance(table, dict) else ():
            row |= {told: tables["versions"] for told, those in row.items() if those == "all"}
    return tables


def main(tables: Collection[str]) -> None:
    """Measure tables, and write them beside what other versions made of the same."""
    version = choose_backend("tensorrt_rtx").version
    write(merge(read(), version, measure(tables or TABLES)))


if __name__ == "__main__":
    main(sys.argv[1:])
