"""Layer tables of small BERT engines, in the names and datatypes that TensorRT-RTX gives them."""

import json

from qdqbench.quantize.engine.results import LayerRow

NORM = "CastMeanSubMulMeanAddSqrtDivMulCastMulAdd"
QUANTIZE = "CastMulMinMaxRounCast"


class Table:
    """Rows in the order of the network; names end in the copy (one a profile) and the place."""

    def __init__(self, copy=0):
        self.rows = []
        self.copy = copy

    def add(self, name, kind, onnx, inputs, outputs, *, constants=()):
        profile = f" [profile {self.copy}]" if self.copy else ""
        name = name.replace("/MatMul", f"/MatMul{profile}")
        self.rows.append(
            LayerRow(
                name=f"{name}_myl{self.copy}_{len(self.rows)}",
                kind=kind,
                onnx=onnx,
                inputs=list(inputs),
                constants=list(constants),
                outputs=list(outputs),
            )
        )

    def generated(self, operations, onnx, inputs, outputs, kind="kgen"):
        self.add(f"__myl_{operations}", kind, onnx, inputs, outputs)


def bert(
    layers=2,
    *,
    int8=True,
    merged=True,
    output="Half",  # datatype that an INT8 GEMM writes
    raw=False,  # the kernel behind a GEMM dequantizes its sums
    attention="fused",  # fused, int8, apart
    norm=NORM,
    dequantized=(),  # linears that dequantize and multiply in FP16, such as "layer.0/output"
    copy=0,
):
    """Rows of one engine."""
    form = locals()
    table = Table(copy)
    table.add("__mye1", "shape_call", [], [], [])
    codes = ["Half", "Int8"] if int8 else ["Half"]
    made = [f"/bert/embeddings/{name}" for name in ("word_embeddings/Gather", "LayerNorm/LayerNormalization")]
    table.generated(f"CastGathAdd{norm}{'CastEtc' if int8 else ''}", made, ["Int64", "Int64"], codes)
    table.generated("CastReshCastSubMul", ["/bert/Sub", "/bert/Cast"], ["Int64"], ["Half"])
    for number in range(layers):
        _layer(table, f"/bert/encoder/layer.{number}", form)
    pooler = ["/bert/pooler/dense/Gemm", "/bert/pooler/activation/Tanh"]
    table.generated("FcAddTanh", pooler, ["Half"], ["Half"], "runtime_fusion")
    table.generated("FcAddCast", ["/classifier/Gemm", "logits/Cast"], ["Half"], ["Float"], "runtime_fusion")
    return table.rows


def _layer(table, path, form):
    int8, kind = form["int8"], "Int8" if form["int8"] else "Half"
    self_, back = f"{path}/attention/self", ["Half"] if form["output"] == "Half" else ["Float"]
    scaled = "Mul" if int8 else ""

    def gemm(*modules):
        nodes = [f"{module}/MatMul" for module in modules]
        quantizers = [f"{module}/weight_quantizer/DequantizeLinear" for module in modules] if int8 else []
        if any(module.removeprefix("/bert/encoder/") in form["dequantized"] for module in modules):
            table.generated("CastMulCastFc", [*quantizers, *nodes], ["Half"], ["Half"], "runtime_fusion")
            table.rows[-1].constants += ["Float", "Int8"]
            return
        made = back if int8 else ["Half"]
        table.add(
            "+".join(nodes), "gemm", [*nodes, *quantizers], [kind], made, constants=[kind, "Float", "Float"]
        )

    def behind(module, *nodes):
        """ONNX nodes of the kernel that takes a GEMM's result."""
        extra = [f"{module}/MatMul", f"{module}/weight_quantizer/DequantizeLinear"] if form["raw"] else []
        return [*extra, f"{module}/Add", *nodes]

    qkv = [f"{self_}/{name}" for name in ("value", "key", "query")]
    for group in [qkv] if form["merged"] else [[module] for module in qkv]:
        gemm(*group)
    codes = form["attention"] == "int8"
    for module in qkv:
        moved = behind(module, f"{self_}/Transpose", f"{self_}/Reshape")
        words = f"{scaled}Add{QUANTIZE if codes else ''}ReshTranReshMove"
        table.generated(words, moved, back if int8 else ["Half"], ["Int8" if codes else "Half"])
    products = [f"{self_}/MatMul", f"{self_}/MatMul_1"]
    if form["attention"] == "apart":
        table.add(products[0], "gemm", products[:1], ["Half", "Half"], ["Half"], constants=["Float"])
        table.generated(
            "MulAddCastMaxrSubExpSumDivMulCast", [f"{self_}/Softmax", f"{self_}/Add"], ["Half"], ["Half"]
        )
        table.add(products[1], "gemm", products[1:], ["Half", "Half"], ["Half"], constants=["Float"])
        out = [f"{path}/attention/output/dense/input_quantizer/QuantizeLinear", f"{self_}/Transpose_3"]
        table.generated(f"{QUANTIZE if int8 else ''}ReshTran", out, ["Half"], [kind])
    else:
        operand = "Int8" if codes else "Half"
        nodes = [*products, f"{self_}/Softmax"]
        table.add("_gemm_mha_v2", "kgen", nodes, [operand, operand, "Half", operand], [kind])
        if int8 and not codes:
            table.generated("MoveReshTran", [f"{self_}/Transpose_3"], ["Int8"], ["Int8"])
    codes_too = ["Half", "Int8"] if int8 else ["Half"]
    tail = QUANTIZE if int8 else ""

    def norm(module, following):
        nodes = behind(f"{module}/dense", f"{module}/LayerNorm/LayerNormalization", f"{module}/Add")
        nodes += [f"{path}/{following}/input_quantizer/QuantizeLinear"] if int8 else []
        table.generated(f"{scaled}AddAdd{form['norm']}{tail}", nodes, ["Half", *back], codes_too)

    gemm(f"{path}/attention/output/dense")
    norm(f"{path}/attention/output", "intermediate/dense")
    gelu = f"{path}/intermediate/intermediate_act_fn/Gelu"
    if int8:
        gemm(f"{path}/intermediate/dense")
        table.generated(
            f"MulAddDivCastErfCastAddMulMul{tail}", behind(f"{path}/intermediate/dense", gelu), back, [kind]
        )
    else:
        nodes = [gelu, f"{path}/intermediate/dense/Add", f"{path}/intermediate/dense/MatMul"]
        table.generated("FcAddDivCastErfCastAddMulMul", nodes, ["Half"], ["Half"], "runtime_fusion")
    gemm(f"{path}/output/dense")
    norm(f"{path}/output", "next")


def inspector_json(rows, schema=11):
    """Rows as the inspector of TensorRT 10 or 11 writes them."""

    def tensors(names):
        if schema == 10:
            return [{"Name": "t", "Dimensions": [-1, 32], "Format/Datatype": name} for name in names]
        return [
            {"Name": "t", "Dimensions": [-1, 32], "Datatype": name, "Format": "Row major"} for name in names
        ]

    layers = []
    for row in rows:
        layer = {"Name": row.name, "LayerType": row.kind, "Inputs": tensors(row.inputs)}
        if schema != 10:
            layer["Constants"] = tensors(row.constants)
        layer |= {"Outputs": tensors(row.outputs), "TacticName": "", "StreamId": 0}
        layer["Metadata"] = "\x1f".join(f"[ONNX Layer: {name}]" for name in row.onnx)
        layers.append(layer)
    return json.dumps({"Layers": layers, "Bindings" if schema == 10 else "I/O Tensors": []})
