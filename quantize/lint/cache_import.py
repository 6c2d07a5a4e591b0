"""Calibration caches of TensorRT 5 to 10: a reader, and a recipe with the amax of a cache.

The first line says which version and calibrator wrote it (`TRT-8601-EntropyCalibration2`). Any other line is
a tensor's name, a colon and eight hex digits: the scale (amax / 127) as float32, the most significant byte
first. The names are those of the ONNX file that was calibrated.
"""

import math
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx

from qdqbench.quantize.engine.hazards import version_text
from qdqbench.quantize.graph.index import MATMULS, SAME_VALUES, GraphIndex, module_of
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.models.load import create_untrained, prepare_model, read_model_config
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.recipe.schema import dump_short_recipe, parse_recipe, validate_recipe
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import FP16_MAX
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.schema import Strict

MAX_CACHE_BYTES = 16 << 20  # BERT-large has some 2,000 tensors and 150 KB
MAX_NAME = 4096
_HEAD = re.compile(r"TRT-(\d{1,9})-(\w{1,64})")
_SCALE = re.compile(r"[0-9a-fA-F]{8}")


@dataclass(frozen=True)
class CalibrationCache:
    version: str  # of TensorRT, such as 8.6.1
    calibrator: str  # EntropyCalibration2, MinMaxCalibration, ...
    scales: dict[str, float]  # by tensor; amax / 127, finite and at least 0 (0: it saw zeros alone)


def is_cache(start: bytes) -> bool:
    return _HEAD.match(start.partition(b"\n")[0].decode("latin-1")) is not None


def read_cache_file(path: Path) -> CalibrationCache:
    """Read a calibration cache; memory is bounded, and UserError names the first lines at fault."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_CACHE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: no possible path
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {why}; give a calibration cache") from error
    if len(data) > MAX_CACHE_BYTES:
        raise UserError(f"{path} has over {MAX_CACHE_BYTES} bytes, and no calibration cache is so large")
    head, *lines = data.decode("utf-8", errors="surrogateescape").splitlines() or [""]
    known = _HEAD.fullmatch(head.strip())
    if known is None:
        raise UserError(
            f"{path} is no calibration cache: its first line is not like TRT-8601-EntropyCalibration2"
        )
    scales: dict[str, float] = {}
    wrong = []
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        name, colon, text = line.rpartition(":")  # a name may hold colons
        hexadecimal = _SCALE.fullmatch(text.strip())
        scale = struct.unpack(">f", bytes.fromhex(hexadecimal[0]))[0] if hexadecimal else math.nan
        good = colon and name.strip() and len(name) <= MAX_NAME and name.isprintable()
        if good and math.isfinite(scale) and scale >= 0:
            scales[name.strip()] = float(scale)
        else:
            wrong.append(f"line {number}")
    if wrong:
        raise UserError(
            f"{path} is no calibration cache, or damaged: {name_list(wrong)} must be a name, a colon and the "
            "eight hex digits of a scale; calibrate again"
        )
    if not scales:
        raise UserError(f"{path} is a calibration cache without tensors; calibrate again")
    return CalibrationCache(version_text(int(known[1])), known[2], scales)


class FromCache(Strict):
    recipe: str  # its name
    text: str  # YAML
    version: str  # of the TensorRT that wrote the cache
    calibrator: str
    graph: str  # where linears were found in
    given: dict[str, float]  # amax by quantizer, of the cache
    tensors: dict[str, str]  # by quantizer: the tensor of the cache
    calibrated: dict[str, str]  # linears whose amax comes from data, and why
    unused: int  # tensors of the cache that no INT8 linear reads


def recipe_from_cache(cache: Path, model: str, onnx_file: Path, *, revision: str | None = None) -> FromCache:
    """Write a recipe with the amax of a cache, for linears of the graph that it names; UserError: none."""
    from qdqbench.quantize.recipe.new import new_recipe  # imports torch, which `diagnose` does without

    found = read_cache_file(cache)
    draft = new_recipe(model, revision)
    data = parse_recipe(draft.text, draft.recipe).model_dump(mode="json")
    # nothing may change the range of tensors before they are quantized
    data["calibration"] |= {"smoothing": "none", "outlier_channel_splitting": 0, "centering": False}
    network = prepare_model(create_untrained(model, read_model_config(model, revision)))
    recipe = validate_recipe(data, data["name"])
    plan = resolve(recipe, module_table(network), network.base_model_prefix)
    read = input_tensors(read_model(onnx_file), plan.int8, network.base_model_prefix)
    given, tensors, calibrated = dict[str, float](), dict[str, str](), dict[str, str]()
    for linear in plan.int8:
        runs = read.get(linear, [])  # one of a linear that is not shared
        inputs = [next((name for name in names if name in found.scales), None) for names in runs]
        named = [name for name in inputs if name is not None]
        tensor = max(named, key=found.scales.__getitem__, default="")
        if not runs or len(named) < len(runs):
            why = "cache does not name its input" if runs else "graph does not show it"
            calibrated[linear] = f"the {why}"
        elif not 1e-6 <= (amax := found.scales[tensor] * 127) <= FP16_MAX:
            calibrated[linear] = f"its amax in the cache is {amax:g}"
        else:
            quantizer = f"{linear}.input_quantizer"
            given[quantizer], tensors[quantizer] = float(f"{amax:.8g}"), tensor
    if not given:
        raise UserError(
            f"{cache} cannot be matched with {model}: none of its {len(found.scales)} tensors "
            f"({name_list(list(found.scales)[:3])}, ...) is the input of an INT8 linear in {onnx_file}; give "
            "the file that was calibrated, or calibrate again: `qdqbench recipes new`"
        )
    count, total = len(given), len(plan.int8)
    source = f"{count} amax of a calibration cache of TensorRT {found.version}"
    data["description"] = f"{data['name']}, with {source}."
    data["name"] += "-from-cache"
    data["calibration"]["amax"] = given
    recipe = validate_recipe(data, data["name"])
    shown = "".join(c if c.isprintable() else "?" for c in cache.name)[:100]
    head = [
        f"# Written by `qdqbench recipes from-cache` from {shown}",
        f"# (TensorRT {found.version}, {found.calibrator}), matched with the ONNX file given.",
        f"# Given: the inputs of {count} of {total} INT8 linears. Weights, and what is not given, are",
        "# calibrated; `calibration.json` has what calibration found next to what is given.",
        *(f"# calibrated: {linear}: {why}" for linear, why in calibrated.items()),
    ]
    return FromCache(
        recipe=recipe.name,
        text="\n".join([*head, dump_short_recipe(recipe)]),
        version=found.version,
        calibrator=found.calibrator,
        graph=str(onnx_file),
        given=given,
        tensors=tensors,
        calibrated=calibrated,
        unused=len(found.scales) - len(set(tensors.values())),
    )


def input_tensors(
    model: onnx.ModelProto, linears: Collection[str], prefix: str
) -> dict[str, list[list[str]]]:
    """Return what each run of a linear reads: tensors of one range, the nearest first."""
    index, found = GraphIndex(model), dict[str, list[list[str]]]()
    names = {linear: linear for linear in linears}
    names |= {linear.removeprefix(f"{prefix}."): linear for linear in linears}
    for node in model.graph.node:
        if node.op_type in MATMULS and len(node.input) >= 2:
            readers = [reader for output in node.output for reader in index.consumers.get(output, ())]
            added = [name for reader in readers if reader.op_type == "Add" for name in reader.input]
            stored = [name for name in (*node.input[1:], *added) if name in index.initializers]
            paths = [name.removesuffix(".weight").removesuffix(".bias") for name in stored]
            linear = next((names[path] for path in (module_of(node.name), *paths) if path in names), None)
            if linear is not None:
                read = [name for name, _ in index.back(node.input[0], SAME_VALUES)]
                found.setdefault(linear, []).append(read)
    return found
