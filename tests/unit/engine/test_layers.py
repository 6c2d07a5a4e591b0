import json
import re
import time
from pathlib import Path

import pytest
import yaml
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
    format_count,
    is_int8,
    kernel_kind,
    measure_coverage,
    name_parts,
    parse_inspector_json,
    parse_log,
    read_table,
    select_profile,
    why_not,
)
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.lint.inspection import inspect_layers
from qdqbench.quantize.utils.errors import UserError

from ...support.layer_tables import bert

GOLDEN = Path(__file__).parents[2] / "golden"
SELF = "/bert/encoder/layer.0/attention/self"
QKV = [f"{SELF}/{name}/MatMul" for name in ("key", "query", "value")]
OUTPUT = "/bert/encoder/layer.0/attention/output/dense/MatMul"
POOLER = "/bert/pooler/dense/Gemm"
BOTH = [f"{SELF}/MatMul", f"{SELF}/MatMul_1"]


def golden(name: str) -> str:
    return (GOLDEN / name).read_text(encoding="utf-8")


def row(name: str, kind: str = "gemm", **fields: list[str]) -> LayerRow:
    values = {"onnx": list[str](), "inputs": ["Int8"], "constants": ["Int8"], "outputs": ["Float"]}
    return LayerRow(name=name, kind=kind, **(values | fields))


@pytest.mark.parametrize("schema", ["inspector_trt10.json", "inspector_trt11.json"])
def test_both_inspector_schemas_prove_the_same(schema):
    layers = parse_inspector_json(golden(schema))
    proof = measure_coverage(layers, [*QKV, OUTPUT], [*QKV, OUTPUT, POOLER, *BOTH])
    assert proof.int8_gemms == sorted([*QKV, OUTPUT])
    assert (proof.not_int8, proof.unknown) == ([], [])
    assert (proof.attention_fused, proof.attention_int8) == (1, 0)  # FP16 attention that writes INT8


def test_datatypes_of_both_schemas():
    old, new = (parse_inspector_json(golden(f"inspector_trt{n}.json")) for n in (10, 11))
    assert [(r.kind, r.inputs, r.outputs) for r in old] == [(r.kind, r.inputs, r.outputs) for r in new]
    assert [r.outputs for r in old] == [["Int64"], [], ["Half"], ["Half"], ["Int8"], ["Half"], ["Half"]]
    assert new[4].inputs == ["Half"] * 4
    assert new[2].constants == ["Int8", "Float", "Float"]
    assert all(r.constants == [] for r in old)


def test_log_of_two_profiles_with_int8_attention():
    rows = parse_log(golden("build_log_int8_attention.txt").split("\n"))
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


def test_log_without_separators_in_metadata_or_as_one_message():
    lines = golden("build_log_int8_attention.txt").split("\n")
    assert "\x1f" in "".join(lines)
    for log in ([line.replace("\x1f", "") for line in lines], ["\n".join(lines)]):
        assert parse_log(log) == parse_log(lines)


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
    rows = parse_log(golden("build_log_not_int8.txt").split("\n"))
    proof = measure_coverage(rows, [node], [])
    assert proof.not_int8 == [node]
    assert proof.int8_gemms == []
    assert proof.unknown == ([node] if "no kernel" in reason else [])
    assert reason in str(why_not(rows, node))


CASES = yaml.safe_load((Path(__file__).parent / "layers.yaml").read_text(encoding="utf-8"))
GEMM = {"kind": "gemm", "onnx": [], "inputs": ["Int8"], "constants": ["Int8"], "outputs": ["Float"]}
KERNEL = {"kind": "kgen", "onnx": [], "inputs": ["Half"], "constants": [], "outputs": ["Half"]}
OF_NODE = {"short": layers.shorten_node, "block": layers.block_of_node}
OF_KERNEL = {
    "is_a": layers.kernel_kind,
    "precision": layers.norm_precision,
    "int8": is_int8,
    "label": layers.kernel_label,
    "block": layers.kernel_block,
    "copy": copy_of,
    "base": base_name,
}


@pytest.mark.parametrize("node", CASES["nodes"])
def test_a_node(node):
    assert {key: OF_NODE[key](node) for key in CASES["nodes"][node]} == CASES["nodes"][node]


@given(st.text(alphabet="/.layer0123MatMulGemself_+", max_size=30))
def test_any_name_has_a_short_one(node):
    assert layers.shorten_node(node) or not node
    assert layers.block_of_node(node)


@pytest.mark.parametrize("case", CASES["kernels"], ids=lambda case: case["name"])
def test_a_kernel(case):
    fields = {key: value for key, value in case.items() if key != "expect"}
    found = LayerRow(**KERNEL | fields)
    assert {key: OF_KERNEL[key](found) for key in case["expect"]} == case["expect"]


@pytest.mark.parametrize("case", CASES["tables"])
def test_a_table(case):
    rows = [LayerRow(**GEMM | fields) for fields in case["rows"]]
    proof = measure_coverage(rows, case["asked"], case.get("known", []))
    assert {key: getattr(proof, key) for key in case["expect"]} == case["expect"]


def test_ranges_and_groups_of_names():
    assert layers.format_ranges([5, 0, 1, 2, 2]) == "0-2,5"
    assert layers.format_ranges([]) == ""
    nodes = [f"/e/layer.{n}/{leaf}/dense/MatMul" for n in (0, 1, 3) for leaf in ("intermediate", "output")]
    assert layers.format_nodes([*nodes, POOLER]) == "layer.0-1,3: intermediate, output; pooler"
    many = layers.format_nodes([f"/e/layer.{n}/m{n}/MatMul" for n in range(9)])
    assert many.endswith("; and 3 more")


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
    assert rows == parse_inspector_json(golden(schema))
    own = tmp_path / "layers.json"  # as qdqbench writes it; build.json has other keys too
    own.write_text(json.dumps({"file": "x.engine", "layers": [row.model_dump() for row in rows]}))
    assert read_table(own) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not engine inspector JSON"),
        ("[]", "not engine inspector JSON"),
        ('{"Bindings": []}', "not engine inspector JSON"),
        ("[" * 100_000, "not engine inspector JSON"),
        ('{"Layers": []}', "lists no layers"),
        ('{"layers": [{"name": "x"}]}', "not engine inspector JSON"),
        ('{"Layers": ["/a/MatMul"]}', "ProfilingVerbosity.DETAILED"),
        ('{"Layers": {}}', "ProfilingVerbosity.DETAILED"),
        ('{"Layers": [' + ",".join(["{}"] * (MAX_TABLE_LAYERS + 1)) + "]}", f"at most {MAX_TABLE_LAYERS}"),
        ('{"layers": [' + ",".join(["{}"] * (MAX_TABLE_LAYERS + 1)) + "]}", f"at most {MAX_TABLE_LAYERS}"),
    ],
    ids=["empty", "list", "other", "deep", "no-layers", "half", "names", "no-list", "many", "many-own"],
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


# Names.


def test_a_kernel_of_two_gemms_has_both_names_and_pluses_alone_are_none():
    assert {"/a/MatMul", "/b/MatMul"} <= {*name_parts(row("/a/MatMul+/b/MatMul_myl0_3"))}
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


# Kernels of an engine with several profiles are counted for one.


def copies(number: int) -> list:
    """The table of an engine with that many profiles."""
    return [
        row.model_copy(update={"name": row.name.replace("_myl0_", f"_myl{copy}_")})
        for copy in range(number)
        for row in bert()
    ]


def test_one_profile_is_counted_and_the_others_are_said():
    rows, profiles = select_profile(bert())
    assert profiles == 1
    assert format_count(bert()) == f"{len(rows)} kernels"
    four = copies(4)
    assert (len(select_profile(four)[0]), select_profile(four)[1]) == (len(rows), 4)
    assert format_count(four) == f"{4 * len(rows)} kernels, {len(rows)} for each of 4 profiles"
    assert sum(inspect_layers(four).kernel_counts.values()) == len(rows)


def test_profiles_with_other_kernels_are_told_by_the_most():
    less = [row for row in copies(2) if not row.name.endswith("_myl1_3")]
    rows, _ = select_profile(bert())
    total = len(less) - (len(copies(2)) - 2 * len(rows))
    assert format_count(less) == f"{total} kernels, at most {len(rows)} for each of 2 profiles"


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_layernorms_of_cpu_runtimes_are_counted(backend):
    """OpenVINO's kernel of the statistics, MVN, is named after no ONNX node; what scales it is."""
    rows = json.loads(golden(f"layers_{backend}.json"))
    layers = [LayerRow.model_validate(row) for row in rows]
    assert sum(inspect_layers(layers).layernorm.values()) == 2 * 6 + 1
    assert "elementwise" not in {kernel_kind(row) for row in layers if row.kind == "MVN"}
