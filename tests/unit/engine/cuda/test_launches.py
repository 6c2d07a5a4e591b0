"""Whatever a plan of backend cuda says, it is refused, or its launches stay inside their buffers."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.quantize.engine.cuda import runtime
from qdqbench.quantize.engine.cuda.check import list_arrays
from qdqbench.quantize.engine.cuda.compile import get_version
from qdqbench.quantize.engine.cuda.file import write_safetensors
from qdqbench.quantize.engine.cuda.interpret import interpret
from qdqbench.quantize.engine.cuda.names import find_target, list_kernels
from qdqbench.quantize.engine.cuda.plan import Plan, parse
from qdqbench.quantize.engine.cuda.reader import parse_engine
from qdqbench.quantize.engine.cuda.tokens import pack_tokens
from qdqbench.quantize.utils.errors import QdqError, UserError

from ....support.recorded import RecordedEngine, record_launches

HOPPER, AMPERE = find_target("9.0"), find_target("8.0")
WIDTH = 64
KINDS = {"h": ("fp16", 1), "c": ("int8", 1), "qkv": ("int8", 3), "ctx": ("int8", 1)}
KINDS |= {"s": ("fp16", 1), "n": ("fp16", 1), "d": ("int8", 1), "f": ("int8", 2), "g": ("fp16", 1)}
PLAN = {  # a layer of attention and one of a feed-forward network
    "inputs": ["input_ids", "attention_mask", "token_type_ids"],
    "tensors": {name: {"kind": kind, "width": times * WIDTH} for name, (kind, times) in KINDS.items()},
    "operations": [
        {"op": "embed", "name": "embed", "epsilon": 1e-12, "half": "h", "codes": ["c"], "span": 64},
        {"op": "linear", "name": "qkv", "input": "c", "weight": "int8", "output": "qkv"},
        {
            "op": "attention",
            "name": "att",
            "query": {"tensor": "qkv"},
            "key": {"tensor": "qkv", "column": WIDTH},
            "value": {"tensor": "qkv", "column": 2 * WIDTH},
            "heads": 2,
            "head_size": 32,
            "score_scale": 1e-4,
            "probability_multiplier": 127.0,
            "row_max": False,
            "biased": True,
            "output": "ctx",
        },
        {"op": "linear", "name": "out", "input": "ctx", "weight": "int8", "residual": "h", "output": "s"},
        {"op": "norm", "name": "norm", "input": "s", "epsilon": 1e-12, "half": "n"},
        {"op": "quantize", "name": "z", "input": "n", "codes": ["d"]},
        {"op": "linear", "name": "up", "input": "d", "weight": "int8", "activation": "gelu", "output": "f"},
        {"op": "linear", "name": "down", "input": "f", "weight": "int8", "residual": "n", "output": "g"},
        {
            "op": "head",
            "name": "head",
            "input": "g",
            "pooling": "first",
            "steps": [{"kind": "dense"}, {"kind": "tanh"}, {"kind": "dense"}],
            "answers": [{"name": "logits"}],
        },
    ],
}
FIELDS = {  # of any operation, view, tensor or answer
    "kind": ["fp16", "int8"],
    "width": [1, 4, 8, 16, 32, 48, 60, 66, 96, 128, 192, 196, 256],
    "column": [-64, 0, 1, 8, 16, 32, 100, 128, 160, None],
    "heads": [1, 2, 3, 4, 8],
    "head_size": [8, 16, 32, 64, 128],
    "weight": ["fp16", "int8"],
    "activation": ["gelu", "gelu_tanh", None],
    "residual": [*KINDS, None],
    "half": [*KINDS, None],
    "probability_multiplier": [127.0, 255.0, 254.0, 0.0, -1.0, None],
    "row_max": [True, False],
    "biased": [False],
    "span": [None, 1, 15, 16, 1000],
    "epsilon": [0.0, -1.0, 1e-12, 1e30],
    "pooling": ["tokens", "first", "mean", "last"],
    "padding": [0, 5, None],
    "typed": [True, False],
    **{key: [*KINDS] for key in ("input", "output", "tensor")},
    "name": ["embed", "qkv", "att", "out", "norm", "head", "c", "head.0"],
    "codes": [[], ["c"], ["d"], ["c", "d"], ["f"]],
    "steps": [[], [{"kind": "dense"}], [{"kind": "normalize"}], [{"kind": "dense"}, {"kind": "dense"}]],
    "answers": [[{"name": "logits", "column": 1}], [{"name": "a"}, {"name": "a"}], []],
}


def places_of(plan):
    """Records of a plan with a field of `FIELDS`, and that field."""
    views = (each[part] for each in plan["operations"] for part in ("query", "key", "value") if part in each)
    records = [*plan["tensors"].values(), *plan["operations"], *views]
    return [(record, name) for record in records for name in FIELDS if name in record]


@st.composite
def plans(draw):
    """A plan with one to three changes."""
    plan = copy.deepcopy(PLAN)
    for _ in range(draw(st.integers(1, 3))):
        operations = plan["operations"]
        what = draw(st.sampled_from(["field"] * 6 + ["width of all", "drop", "again", "swap"]))
        if what == "field":
            record, name = draw(st.sampled_from(places_of(plan)))
            record[name] = draw(st.sampled_from(FIELDS[name]))
        elif what == "width of all":
            old, new = draw(st.sampled_from([64, 128, 192])), draw(st.sampled_from(FIELDS["width"]))
            for tensor in plan["tensors"].values():
                tensor["width"] = new if tensor["width"] == old else tensor["width"]
        else:
            at, other = (draw(st.integers(0, len(operations) - 1)) for _ in range(2))
            if what == "drop":
                del operations[at]
            elif what == "again":
                operations.insert(other, copy.deepcopy(operations[at]))
            else:
                operations[at], operations[other] = operations[other], operations[at]
    return plan


def file_of(plan: dict) -> bytes:
    """An engine file with arrays of the shapes that the plan asks for; UserError where it has none."""
    made = parse(Plan, plan)
    arrays: dict[str, np.ndarray] = {}
    for number in range(3):  # the head's follow from each other
        arrays |= {f"head.{number}.weight": np.ones((8, 0), np.float32)}
    try:
        for operation in made.operations:
            for name, kind, shape in list_arrays(operation, made, arrays):
                sizes = [64 if size is None else size for size in shape]
                arrays[name] = np.full(sizes, 2.0**-8 if kind != "int8" else 1, kind)
        codes = {
            f"code.{target.name}.x": "".join(
                f"\0.text.{name}\0" for name in sorted(list_kernels(made, target))
            )
            for target in (HOPPER, AMPERE)
        }
    except (KeyError, IndexError, ValueError):  # tensors that are none
        raise UserError("no file") from None
    arrays = {name: array for name, array in arrays.items() if array.size}
    told = {"version": get_version(), "plan": json.dumps(plan)}
    return write_safetensors(
        arrays | {key: np.frombuffer(each.encode(), np.uint8) for key, each in codes.items()}, told
    )


def faults_of(plan: dict, monkeypatch) -> list[str] | None:
    """What is wrong with the launches of a plan; None where it is refused."""
    try:
        found = parse_engine(file_of(plan), "x.engine", get_version())
    except QdqError:
        return None
    monkeypatch.setattr(runtime, "map_tiles", lambda matrix, rows: matrix)
    shape = 3, 16
    batch = {name: np.ones(shape, np.int64) * (name == "attention_mask") for name in found.plan.inputs}
    tokens = pack_tokens(found.plan, found.arrays, batch)
    with np.errstate(all="ignore"):
        answers = interpret(found.plan, found.arrays, batch)
    assert all(len(answer) == len(batch["input_ids"]) for answer in answers.values())
    if any(each.probability_multiplier is None for each in found.plan.attentions):
        return []  # PyTorch's attention, which needs a GPU
    engines = (RecordedEngine(found.plan, found.arrays, {}, target) for target in (HOPPER, AMPERE))
    return [fault for engine in engines for fault in record_launches(engine, tokens)]


def test_launches_of_a_right_plan_have_no_fault(monkeypatch):
    assert faults_of(PLAN, monkeypatch) == []


@pytest.mark.parametrize("column", [3 * WIDTH - 16, 2 * WIDTH + 8])
def test_a_fault_is_seen_where_nothing_is_checked(column, monkeypatch):
    reader = "qdqbench.quantize.engine.cuda.reader"
    for name in ("check_arrays", "require_kernels"):
        monkeypatch.setattr(f"{reader}.{name}", lambda *_: None)
    monkeypatch.setattr(f"{__name__}.interpret", lambda *_: {})
    plan = copy.deepcopy(PLAN)
    plan["operations"][2]["value"]["column"] = column
    assert faults_of(plan, monkeypatch)


@settings(deadline=None)
@given(plan=plans())
def test_a_changed_plan_is_refused_or_stays_inside_its_buffers(plan):
    with pytest.MonkeyPatch.context() as patch:
        assert not faults_of(plan, patch)


@pytest.mark.parametrize("name", ["7.5", "9.0"])
def test_attention_takes_as_many_keys_as_a_gpu_has_room_for(name, monkeypatch):
    monkeypatch.setattr(runtime, "map_tiles", lambda matrix, rows: matrix)
    plan = copy.deepcopy(PLAN)
    plan["operations"][2] |= {"heads": 1, "head_size": 64}
    found, target = parse_engine(file_of(plan), "x.engine", get_version()), find_target(name)
    batch = {name: np.zeros((2, 64), np.int64) for name in found.plan.inputs} | {
        "attention_mask": np.ones((2, 64), int)
    }
    tokens = pack_tokens(found.plan, found.arrays, batch)
    engine = RecordedEngine(found.plan, found.arrays, {}, target)
    monkeypatch.setattr(runtime, "choose_graph", lambda _: (128, 2, 512, 512))  # of long rows
    assert record_launches(engine, tokens) == []
    assert 48 << 10 < engine._kernels.shared <= target.shared
