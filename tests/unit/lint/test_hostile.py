"""Damaged and hostile files: every one ends in a finding or one clear error, in little time and memory."""

import contextlib
import json
import os
import random
import resource
import struct
import time
from collections.abc import Callable

import numpy as np
import onnx
import pytest

from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.lint.diagnose import diagnose
from qdqbench.quantize.lint.fix import FixOptions, rewrite
from qdqbench.quantize.lint.runs import read_feeds
from qdqbench.quantize.utils.errors import UserError

from ...support.build_logs import POLYGRAPHY, missing_scale, trtexec
from ...support.disfigured import disfigure
from ...support.foreign_layer import float_layer
from ...support.layer_tables import bert, inspector_json
from ...support.tiny_layer import FORMS, healthy

CASES, SECONDS, MEGABYTES = 10_000, 5.0, 1_500
NAMES = [
    b"<script>alert(1)</script>", b"\x1b[2J\x1b]0;x\x07", b"../../../etc/passwd", b"{0.__class__}", b"\x00",
    b"%s%n", b"[bold]", "\u202e".encode(), b"A" * 3000, b'"}],[{"',
]  # fmt: skip
NUMBERS = [b"9" * 400, b"-1", b"1e999", b"NaN", b"0", b"4294967296", b"18446744073709551616"]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A copy with one to four faults."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(made) + 1)
        kind = rng.randrange(9)
        if kind == 0:
            del made[place:]
        elif kind == 1 and made:
            made[place % len(made)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            made[place : place + rng.randrange(64)] = rng.randbytes(rng.randrange(64))
        elif kind == 3:
            made[place:place] = rng.choice(NAMES)
        elif kind == 4:
            made[place : place + rng.randrange(1, 9)] = rng.choice(NUMBERS)
        elif kind == 5:
            made[place:place] = b"\xff" * 9 + b"\x01"  # the largest varint, as a length
        elif kind == 6:
            part = made[place : place + rng.randrange(200)]
            made[place:place] = part * rng.randrange(1, 50)
        elif kind == 7 and made:
            del made[place % len(made) : place % len(made) + rng.randrange(1, 200)]
        else:
            made[place:place] = struct.pack("<I", rng.randrange(1 << 32))
    return bytes(made)


def disfigured(data: bytes, rng: random.Random) -> onnx.ModelProto:
    model = onnx.load_from_string(data)
    disfigure(model, rng)
    return model


def profile() -> bytes:
    rows = [{"name": row.name, "timeMs": 1.0, "averageMs": 0.1, "percentage": 1.0} for row in bert()]
    return json.dumps([{"count": 9}, *rows]).encode()


def cache() -> bytes:
    lines = [f"/layer.{n}/MatMul: {struct.pack('>f', 0.1 + n).hex()}" for n in range(30)]
    return "\n".join(["TRT-8601-EntropyCalibration2", *lines, ""]).encode()


def engine() -> bytes:
    return b"ptrt" + bytes(20) + bytes([10, 0, 0, 6]) + bytes(200)


BASES: dict[str, Callable[[], list[bytes]]] = {
    "onnx": lambda: [healthy("fp16").SerializeToString(), float_layer().SerializeToString()],
    "log": lambda: [trtexec(*missing_scale("a", "b")).encode(), POLYGRAPHY.encode()],
    "table": lambda: [inspector_json(bert(layers=1), schema).encode() for schema in (10, 11)],
    "profile": lambda: [profile()],
    "cache": lambda: [cache()],
    "engine": lambda: [engine()],
}


def hold(path, seconds: float = SECONDS) -> bool:
    """Whether the file was read; an error must be one sentence of ours."""
    started, said = time.perf_counter(), ""
    try:
        report = diagnose([path])
        json.dumps(report.model_dump(mode="json"), allow_nan=False)
    except UserError as error:
        said = str(error) or "nothing"
    assert said != "nothing"
    assert len(said) < 5_000
    assert time.perf_counter() - started < seconds
    return not said


def storm(tmp_path, kind: str, cases: int) -> int:
    bases, path = BASES[kind](), tmp_path / "file"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = 0
    for number in range(cases):
        rng = random.Random(f"{kind} {number}")
        base = bases[number % len(bases)]
        if number % 50 == 49:
            path.write_bytes(rng.randbytes(rng.randrange(1, 400)))
        elif kind == "onnx" and number % 4 < 2:
            path.write_bytes(disfigured(base, rng).SerializeToString())
        else:
            path.write_bytes(damaged(base, rng))
        try:
            read += hold(path)
        except Exception as error:  # pragma: no cover
            raise AssertionError(f"case {number} of {kind}") from error
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < MEGABYTES * 1024, f"{grown} KiB"
    return read


@pytest.mark.parametrize("kind", BASES)
def test_some_damaged_files(tmp_path, kind):
    storm(tmp_path, kind, 40)


@pytest.mark.long
@pytest.mark.parametrize("kind", BASES)
def test_many_damaged_files(tmp_path, kind):
    assert storm(tmp_path, kind, CASES) > 0  # some faults are harmless, or hidden in a name


def rewrite_many(cases: range) -> int:
    """How many disfigured models `fix` rewrites; the others must end in an error of ours."""
    bases, done = [healthy(form).SerializeToString() for form in FORMS], 0
    for number in cases:
        model = disfigured(bases[number % len(bases)], random.Random(f"fix {number}"))
        with contextlib.suppress(UserError):
            stopped = {row.code for row in check_model(model).findings} & {"invalid-onnx", "opset-too-low"}
            if not stopped:
                rewrite(model, FixOptions(), {}, [], [])
                done += 1
    return done


def test_some_disfigured_models_are_rewritten_or_refused():
    assert rewrite_many(range(60)) > 5


@pytest.mark.long
def test_many_disfigured_models_are_rewritten_or_refused():
    assert rewrite_many(range(CASES)) > CASES // 20


@pytest.mark.long
def test_many_damaged_samples(tmp_path):
    """Arrays for --inputs: never unpickled."""
    model, path = float_layer(), tmp_path / "samples.npz"
    np.savez(path, x=np.zeros((2, 4, 32), np.float32), mask=np.zeros((2, 1, 1, 4), np.float32))
    base = path.read_bytes()
    for number in range(CASES):
        path.write_bytes(damaged(base, random.Random(number)))
        started = time.perf_counter()
        with contextlib.suppress(UserError):
            assert set(read_feeds(path, model)) == {"x", "mask"}
        assert time.perf_counter() - started < SECONDS


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/hostname", "link.bin", ".", "", "/dev/zero"])
def test_weights_outside_of_the_folder_are_not_read(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(4096))
    os.symlink(tmp_path / "outside.bin", folder / "link.bin")
    model = float_layer()
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"external data|unnamed file|which is missing"):
        diagnose([folder / "model.onnx"])


@pytest.mark.parametrize(
    "text",
    [
        "[I] Name: " * 30_000 + "\n",
        "[I] Name: a, LayerType: gemm, Inputs: ["
        + "{ Name: x, Datatype: Int8 }], Constants: [" * 2000
        + "\n",
        ("[I] Input build shape: " + "a" * 8000 + "\n") * 300,
        ("[I] " + "--a" * 2000 + " trtexec\n") * 300,
        "[I] Optimization {x [min=[" + "1, " * 5000 + "\n",
        ("[W] [TRT] Missing scale and zero-point for tensor " + "t" * 600 + "\n") * 2_000,
        "[" * 100_000,
        '[{"ms": ' + "[" * 100_000,
        '{"Layers": ' + '{"a":' * 100_000,
        '[{"startComputeMs": 1, "x": "' + '\\"' * 500_000,
        '[{"startComputeMs": 1, "x": ' + "nan(" * 250_000,
    ],
    ids=range(11),
)
def test_texts_that_are_made_to_take_long(tmp_path, text):
    (tmp_path / "file").write_text(text)
    hold(tmp_path / "file", 20.0)
