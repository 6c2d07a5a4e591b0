import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qdqbench.quantize.engine import layers
from qdqbench.quantize.engine.layers import (
    MAX_MERGED,
    MAX_TABLE_BYTES,
    MAX_TABLE_LAYERS,
    base_name,
    copy_of,
    find_computing_rows,
    is_int8,
    measure_coverage,
    name_parts,
    parse_inspector_json,
    parse_log,
    read_table,
    why_not,
)
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.utils.errors import UserError

GOLDEN = Path(__file__).parents[2] / "golden"
SELF = "/bert/encoder/layer.0/attention/self"
QKV = [f"{SELF}/{name}/MatMul" for name in ("key", "query", "value")]
OUTPUT = "/bert/encoder/layer.0/attention/output/dense/MatMul"
POOLER = "/bert/pooler/dense/Gemm"
BOTH = [f"{SELF}/MatMul", f"{SELF}/MatMul_1"]


def golden_log(name: str) -> list[str]:
    return (GOLDEN / name).read_text(encoding="utf-8").split("\n")


def row(name: str, kind: str = "gemm", **fields: list[str]) -> LayerRow:
    values = {"onnx": list[str](), "inputs": ["Int8"], "constants": ["Int8"], "outputs": ["Float"]}
    return LayerRow(name=name, kind=kind, **(values | fields))


@pytest.mark.parametrize("schema", ["inspector_trt10.json", "inspector_trt11.json"])
def test_both_inspector_schemas_prove_the_same(schema):
    layers = parse_inspector_json((GOLDEN / schema).read_text(encoding="utf-8"))
    proof = measure_coverage(layers, [*QKV, OUTPUT], [*QKV, OUTPUT, POOLER, *BOTH])
    assert proof.int8_gemms == sorted([*QKV, OUTPUT])
    assert (proof.not_int8, proof.unknown) == ([], [])
    assert (proof.attention_fused, proof.attention_int8) == (1, 0)  # FP16 attention that writes INT8


def test_datatypes_of_both_schemas():
    old, new = (
        parse_inspector_json((GOLDEN / f"inspector_trt{n}.json").read_text(encoding="utf-8"))
        for n in (10, 11)
    )
    assert [(r.kind, r.inputs, r.outputs) for r in old] == [(r.kind, r.inputs, r.outputs) for r in new]
    assert [r.outputs for r in old] == [["Int64"], [], ["Half"], ["Half"], ["Int8"], ["Half"], ["Half"]]
    assert new[4].inputs == ["Half"] * 4
    assert new[2].constants == ["Int8", "Float", "Float"]
    assert all(r.constants == [] for r in old)


def test_log_of_two_profiles_with_int8_attention():
    rows = parse_log(golden_log("build_log_int8_attention.txt"))
    kinds = ["gemm", "kgen", "kgen", "gemm", "gemm", "kgen", "gemm", "runtime_fusion"]
    assert [r.kind for r in rows] == kinds
    assert rows[0].outputs == ["Float"]
    assert rows[0].onnx[:2] == [
        f"/layer.0/attention/self/value/{n}" for n in ("MatMul", "input_quantizer/DequantizeLinear")
    ]
    assert rows[2].inputs == ["Int8", "Int8", "Half", "Int8"]
    assert rows[2].constants == []
    linears = [
        f"/layer.0/attention/{n}/MatMul" for n in ("output/dense", "self/key", "self/query", "self/value")
    ]
    products = ["/layer.0/attention/self/MatMul", "/layer.0/attention/self/MatMul_1"]
    proof = measure_coverage(rows, linears, [*linears, *products, "/classifier/Gemm"])
    assert proof.int8_gemms == linears
    assert (proof.not_int8, proof.unknown) == ([], [])
    assert (proof.attention_fused, proof.attention_int8) == (1, 1)  # one attention, although two kernels
    assert measure_coverage(rows, [*linears, *products], []).int8_gemms == sorted([*linears, *products])


def test_log_without_separators_in_metadata():
    lines = golden_log("build_log_int8_attention.txt")
    assert "\x1f" in "".join(lines)
    assert parse_log(line.replace("\x1f", "") for line in lines) == parse_log(lines)


def test_log_as_one_message():
    lines = golden_log("build_log_int8_attention.txt")
    assert parse_log(["\n".join(lines)]) == parse_log(lines)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("/layer.0/intermediate/dense/MatMul", "runtime_fusion on Half after dequantizing its weights"),
        ("/layer.0/output/dense/MatMul", "runtime_fusion on Int8 after dequantizing both"),
        ("/layer.0/attention/self/key/MatMul", "gemm on Half, because no Q/DQ pair"),
        ("/layer.9/output/dense/MatMul", "no kernel names it"),
    ],
)
def test_what_is_not_int8_is_named_with_the_reason(node, reason):
    rows = parse_log(golden_log("build_log_not_int8.txt"))
    proof = measure_coverage(rows, [node], [])
    assert proof.not_int8 == [node]
    assert proof.int8_gemms == []
    assert proof.unknown == ([node] if "no kernel" in reason else [])
    assert reason in str(why_not(rows, node))


@pytest.mark.parametrize(
    ("layer", "int8"),
    [
        (row("/a/MatMul_myl0_1"), True),
        (row("/a/MatMul_myl0_1", constants=[]), True),  # TensorRT 10 shows no constants
        (row("/a/MatMul_myl0_1", constants=["Half", "Float"]), False),
        (row("/a/MatMul_myl0_1", inputs=["Half"]), False),
        (row("/a/MatMul_myl0_1", inputs=[]), False),
        (
            row("/a/MatMul_myl0_1", inputs=["Int8", "Int8"], constants=["Float"]),
            True,
        ),  # activation by activation
        (row("/a/MatMul_myl0_1", inputs=["Int8", "Half"]), False),
        (row("/a/MatMul_myl0_1", inputs=["UInt8"]), False),
        (row("/a/MatMul", inputs=["UInt8"]).model_copy(update={"kernel": "brgemm_avx512_I8"}), True),
        (row("/a/MatMul", inputs=["Float"]).model_copy(update={"kernel": "brgemm_avx512_f32"}), False),
        (row("/a/Add", "attention", inputs=["Int8", "Int8", "UInt8", "Int8"]), True),
        (row("/a/Add", "attention", inputs=["Float", "Float", "UInt8", "Float"]), False),
        (row("__myl_CastMulCastFc_myl0_1", "runtime_fusion"), False),
        (row("__myl_MulAdd_myl0_1", "kgen"), False),
        (row("_gemm_mha_v2_myl0_1", "kgen", inputs=["Int8", "Int8", "Half", "Int8"]), True),
        (row("_gemm_mha_v2_myl0_1", "kgen", inputs=["Int8", "Int8", "Int8"]), True),
        (row("_gemm_mha_v2_myl0_1", "kgen", inputs=["Int8", "Int8", "Half", "Half"]), False),
        (row("_gemm_mha_v2_myl0_1", "kgen", inputs=["Half"] * 4), False),
    ],
)
def test_is_int8(layer, int8):
    assert is_int8(layer) is int8


@pytest.mark.parametrize(
    "name",
    [
        "/a/MatMul_myl0_2",
        "/a/MatMul [profile 1]_myl1_2",
        "__mye123/a/MatMul_myl0_2",
        "/b/MatMul+/a/MatMul_myl3_4",
    ],
)
def test_prefixes_and_suffixes_of_a_gemm_name(name):
    assert measure_coverage([row(name)], ["/a/MatMul"], []).int8_gemms == ["/a/MatMul"]


def test_a_name_may_hold_a_plus():
    assert measure_coverage([row("/a+b/MatMul_myl0_1")], ["/a+b/MatMul"], ["/a+b/MatMul"]).int8_gemms == [
        "/a+b/MatMul"
    ]


@pytest.mark.parametrize(
    "name", ["/a/MatMul_1_myl0_2", "/x/a/MatMul_myl0_2", "/a/MatMul_extra", "MatMul_myl0_2"]
)
def test_similar_names_prove_nothing(name):
    proof = measure_coverage([row(name)], ["/a/MatMul"], ["/a/MatMul"])
    assert (proof.int8_gemms, proof.not_int8, proof.unknown) == ([], ["/a/MatMul"], ["/a/MatMul"])


def test_a_gemm_proves_the_nodes_of_its_name_and_not_those_of_its_metadata():
    layers = [row("/a/MatMul_myl0_1", onnx=["/a/MatMul", "/b/MatMul"])]
    proof = measure_coverage(layers, ["/a/MatMul", "/b/MatMul"], [])
    assert (proof.int8_gemms, proof.not_int8, proof.unknown) == (["/a/MatMul"], ["/b/MatMul"], ["/b/MatMul"])


def test_a_nameless_gemm_counts_by_its_metadata_unless_another_kernel_multiplies_the_node():
    gemm = row("__mye12_myl0_1", onnx=["/a/MatMul", "/a/DequantizeLinear"])
    other = row("__myl_FcAdd_myl0_2", "runtime_fusion", onnx=["/a/MatMul"], inputs=["Half"])
    assert measure_coverage([gemm], ["/a/MatMul"], []).int8_gemms == ["/a/MatMul"]
    assert measure_coverage([gemm, other], ["/a/MatMul"], []).not_int8 == ["/a/MatMul"]


def test_a_fused_epilogue_does_not_undo_the_proof_but_another_profile_does():
    gemm = row("/a/MatMul_myl0_1", onnx=["/a/MatMul"])
    epilogue = row(
        "__myl_MulAddFc_myl0_2", "runtime_fusion", onnx=["/a/MatMul", "/b/MatMul"], inputs=["Float"]
    )
    second = row("__myl_CastMulCastFc_myl1_2", "runtime_fusion", onnx=["/a/MatMul"])
    assert measure_coverage([gemm, epilogue], ["/a/MatMul"], ["/b/MatMul"]).int8_gemms == ["/a/MatMul"]
    assert measure_coverage([gemm, second], ["/a/MatMul"], []).not_int8 == ["/a/MatMul"]


def test_attention_must_fuse_in_every_profile():
    products = ["/s/MatMul", "/s/MatMul_1"]
    fused = [row(f"_gemm_mha_v2_myl{n}_1", "kgen", onnx=products, inputs=["Int8"] * 3) for n in (0, 1)]
    apart = [row(f"{name} [profile 1]_myl1_1", onnx=[name], inputs=["Int8", "Int8"]) for name in products]
    whole, half = measure_coverage(fused, products, []), measure_coverage([fused[0], *apart], products, [])
    assert (whole.attention_fused, whole.attention_int8) == (1, 1)
    assert (half.attention_fused, half.attention_int8) == (0, 0)
    assert whole.int8_gemms == half.int8_gemms == products


def test_products_of_two_activations_count_only_where_asked():
    layers = [row("/s/MatMul_myl0_1", inputs=["Int8", "Int8"], constants=["Float"])]
    assert measure_coverage(layers, [], ["/s/MatMul"]).int8_gemms == []
    assert measure_coverage(layers, ["/s/MatMul"], []).int8_gemms == ["/s/MatMul"]


def test_an_empty_table_proves_nothing():
    proof = measure_coverage([], ["/a/MatMul"], ["/a/MatMul", "/b/MatMul"])
    assert (proof.int8_gemms, proof.not_int8) == ([], ["/a/MatMul"])
    assert proof.unknown == ["/a/MatMul", "/b/MatMul"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not engine inspector JSON"),
        ("[]", "not engine inspector JSON"),
        ('{"Bindings": []}', "not engine inspector JSON"),
        ('{"Layers": ["/a/MatMul"]}', "ProfilingVerbosity.DETAILED"),
        ('{"Layers": {}}', "ProfilingVerbosity.DETAILED"),
    ],
)
def test_other_json_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_inspector_json(text)


MARKS = ["Name: ", ", LayerType: ", ", Inputs: [", "], Constants: [", "], Outputs: [", "]"]
_PIECES = [*MARKS, "/a/MatMul", "gemm", ", Constants: [", ", Outputs: [", "{ Datatype: Int8 }"]
_PIECES += [", TacticName: ", ", Metadata: ", "[ONNX Layer: ", "_myl0_1", "+", "\x1f", "\n"]


@given(st.lists(st.sampled_from(_PIECES) | st.text(max_size=5), max_size=30).map("".join))
def test_garbage_lines_never_crash_or_prove(text):
    proof = measure_coverage(parse_log([text]), ["/a/MatMul"], [])
    assert proof.not_int8 == ["/a/MatMul"] or all(piece in text for piece in ("gemm", "Int8", "/a/MatMul"))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["Name", "Datatype"]), inner),
    max_leaves=5,
)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["Name", "LayerType", "Inputs", "Constants", "Outputs", "Metadata"]), _json
        )
    )
)
def test_any_layer_objects_are_read(layers):
    rows = parse_inspector_json(json.dumps({"Layers": layers}))
    assert len(rows) == len(layers)


# Saved tables.


@pytest.mark.parametrize("schema", ["inspector_trt10.json", "inspector_trt11.json"])
def test_a_saved_table_of_any_kind_gives_the_same_rows(schema, tmp_path):
    rows = read_table(GOLDEN / schema)
    assert rows == parse_inspector_json((GOLDEN / schema).read_text(encoding="utf-8"))
    own = tmp_path / "layers.json"  # as qdqbench writes it; build.json has other keys too
    own.write_text(json.dumps({"file": "x.engine", "layers": [row.model_dump() for row in rows]}))
    assert read_table(own) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not engine inspector JSON"),
        ("[" * 100_000, "not engine inspector JSON"),
        ('{"Layers": []}', "lists no layers"),
        ('{"layers": [{"name": "x"}]}', "not engine inspector JSON"),
        ('{"Layers": ["/a/MatMul"]}', "ProfilingVerbosity.DETAILED"),
        ('{"Layers": [' + ",".join(["{}"] * (MAX_TABLE_LAYERS + 1)) + "]}", f"at most {MAX_TABLE_LAYERS}"),
        ('{"layers": [' + ",".join(["{}"] * (MAX_TABLE_LAYERS + 1)) + "]}", f"at most {MAX_TABLE_LAYERS}"),
    ],
    ids=["empty", "deep", "no-layers", "half", "names", "many", "many-own"],
)
def test_a_saved_table_that_is_none_is_refused(text, message, tmp_path):
    path = tmp_path / "saved.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        read_table(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as stream:
        stream.truncate(MAX_TABLE_BYTES + 1)
    with pytest.raises(UserError, match=f"at most {MAX_TABLE_BYTES}"):
        read_table(path)


def test_missing_or_binary_files(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_table(tmp_path / "nothing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match="it is not text"):
        read_table(tmp_path / "binary.json")


# Names.


def test_name_copy_and_base_of_a_kernel():
    generated, merged = row("__myl_AddTanh_myl1_12", "kgen"), row("/a/MatMul+/b/MatMul_myl0_3")
    assert (copy_of(generated), base_name(generated)) == ("1", "AddTanh")
    assert (copy_of(merged), base_name(merged)) == ("0", "/a/MatMul+/b/MatMul")
    assert copy_of(row("Reformat_1", "Reformat")) == ""
    assert {"/a/MatMul", "/b/MatMul"} <= {*name_parts(merged)}


def test_a_name_of_nothing_but_pluses_is_not_taken_apart():
    assert len(name_parts(row("+" * (MAX_MERGED + 1)))) == 2
    assert len(name_parts(row("+" * MAX_MERGED))) == 2 * (MAX_MERGED + 2)


def test_the_rows_that_compute_a_node_come_by_copy():
    rows = [row(f"/a/MatMul{tail}") for tail in ("_myl0_1", " [profile 1]_myl1_1")]
    assert find_computing_rows(rows, ["/a/MatMul", "/b/MatMul"]) == {"/a/MatMul": [[rows[0]], [rows[1]]]}


AS_WRITTEN = re.compile(  # what a line is; matching it takes quadratic time
    r"(?:^|\s)Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: \[(?P<inputs>.*?)\]"
    r"(?:, Constants: \[(?P<constants>.*?)\])?, Outputs: \[(?P<rest>.*)$"
)


@given(st.lists(st.sampled_from([*MARKS, " Name: ", "a", "[", ", "]), max_size=14).map("".join))
@example("Name: a, LayerType: a, Inputs: [a], Constants: [a], Outputs: []")
@example("Name: Name: , LayerType: , LayerType: a, Inputs: [], Constants: [], Constants: [], Outputs: []")
def test_a_line_is_what_the_expression_says(line):
    match = AS_WRITTEN.search(line)
    found = layers._parts(line)
    assert (found is None) == (match is None)
    if match is not None:
        expected = (match[name] or "" for name in ("name", "kind", "inputs", "constants", "rest"))
        assert found == (*expected,)


@pytest.mark.parametrize(
    "part", ["Name: ", " Name: , LayerType: a", " Name: a, LayerType: a, Inputs: [", "], Constants: ["]
)
def test_a_hostile_line_takes_the_time_of_its_length(part):
    """Four times the text takes about four times as long, not sixteen."""
    line = "Name: a, LayerType: a, Inputs: [" + part * (50_000 // len(part))

    def spent(text):
        times = []
        for _ in range(5):
            start = time.process_time()
            assert parse_log([text]) == []
            times.append(time.process_time() - start)
        return min(times)

    assert spent(line * 4) < 8 * spent(line) + 0.05
