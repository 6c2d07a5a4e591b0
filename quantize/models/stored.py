"""Content of a model's files, read before transformers casts codes to weights and drops unknown tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qdqbench.quantize.models.families.others import read_others
from qdqbench.quantize.models.identity import find_model_file, read_model_json
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import read_json
from qdqbench.quantize.utils.names import count_of, name_list

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_LAYERS, MOST_LABELS = 1_000, 100_000  # of a model
SIZES = re.compile(
    r"^(hidden_size|vocab_size|num_attention_heads|num_hidden_layers|n_heads|n_layers|dim)$"
)  # of a configuration: none is 0 or less
POINTER, POINTER_BYTES = b"version https://git-lfs", 1024  # what Git leaves without its extension for files
FLOATS = {"F64", "F32", "F16", "BF16"}
BUFFERS = "_ids"  # ends of names of integers that older checkpoints store, such as of positions
# names of what belongs to a quantized checkpoint, and of parts that have to be merged into weights
SCALES = re.compile(
    r"(^|[._])(scales?|zero_points?|qzeros|qweight|g_idx|amax|absmax|quant_map|quant_state|SCB|weight_format)"
    r"([._]|$)"
)
ADAPTERS = re.compile(
    r"(^|[._])(lora_\w+|base_layer|ia3_l|oft_\w+|hada_\w+|vera_\w+|modules_to_save|adapters?)([._]|$)"
)
# heads and poolers that a model of another task, or an encoder alone, does not read
HEADS = re.compile(
    r"^(\w+\.)?(pooler|cls|classifier|pre_classifier|classification_head|score|head|lm_head|mlm_head|decoder|"
    r"predictions|qa_outputs|vocab_\w+|generator_\w+|discriminator_predictions|lm_predictions|mask_predictions|entity_predictions|"
    r"sop_classifier|seq_relationship|logits_proj)\."
)
PARTS = ("onnx", "openvino")  # folders that may hold a model's only files


def require_model_folder(name: str) -> None:
    """Refuse a folder that holds no model for transformers, and say what it holds."""
    folder = Path(name)
    if not folder.is_dir():
        return
    paths = [*folder.iterdir()]
    for file in paths:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise UserError(f"{file} is no regular file, and reading it may never end; remove it")
        if file.is_file() and file.stat().st_size < POINTER_BYTES and file.read_bytes().startswith(POINTER):
            raise UserError(f"{file} stands for a file that was not downloaded; run `git lfs pull` in {name}")
    files = {file.name for file in paths}
    if "config.json" in files:
        about: Any = None
        with suppress(UserError):  # transformers says what is wrong with it
            about = read_json(folder / "config.json")
        _require_bounds(name, about)
    if "adapter_config.json" in files and WEIGHTS in files:
        raise UserError(
            f"{name} holds an adapter next to a model (adapter_config.json); merge it into the weights "
            "(`merge_and_unload`), or remove its files"
        )
    if "modules.json" in files or ("config.json" in files and {WEIGHTS, INDEX} & files):
        return
    files |= {each.name for part in PARTS for each in (folder / part).glob("*")}
    others = read_others()
    known = [about for file, about in others["files"].items() if file in files]
    known += [about for end, about in others["ends"].items() if any(file.endswith(end) for file in files)]
    if known:
        what, step = known[0]
        raise UserError(f"{name} holds {what}, which is no model to quantize; {step}")
    if "config.json" not in files:
        inner = sorted((str(each.parent) for each in folder.glob("*/config.json")), key=len)
        there = name_list(sorted(files)) or "nothing"
        step = f"give {inner[-1]}" if inner else "give the folder that `save_pretrained` wrote"
        raise UserError(f"{name} has no config.json, so it is no model; it holds {there}; {step}")


def _require_bounds(name: str, config: Any) -> None:
    """Refuse sizes that only a damaged configuration has, before anything of such a size is made."""
    for key, value in config.items() if isinstance(config, dict) else ():
        count = len(value) if isinstance(value, (dict, list)) else value if type(value) is int else 0
        layers = re.search("layers?$", key) or ("layer" in key and isinstance(value, (dict, list)))
        most = MOST_LAYERS if layers else MOST_LABELS if "label" in key else None
        if most is not None and count > most:
            raise UserError(
                f"model {name} has {count:,} as {key} (config.json), and {most:,} are the most; correct it"
            )
        if SIZES.search(key) and type(value) is int and value < 1:
            raise UserError(
                f"model {name} has {value} as {key} (config.json), and 1 is the least; correct it"
            )


def require_plain_config(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration of quantized weights, or of a model with code of its own."""
    if quantized := config.get("quantization_config"):
        method = dict(quantized).get("quant_method", "an unknown method")
        raise UserError(
            f"the weights of model {name} are quantized already ({method}, by quantization_config in "
            "config.json); give the original model"
        )
    for kind, code in (config.get("auto_map") or {}).items():
        own = str(code[0] if isinstance(code, list) else code)
        if kind.startswith("AutoModel") and not _is_of_transformers(own.rpartition(".")[2]):
            raise UserError(
                f"model {name} has code of its own ({own}, by auto_map in config.json), which is never run; "
                "give a model that transformers itself has"
            )


def _is_of_transformers(name: str) -> bool:
    import transformers

    with suppress(Exception):  # names of optional classes raise many kinds of errors
        return hasattr(transformers, name)
    return False


def require_plain_weights(name: str, commit: str | None, inside: str = "") -> None:
    """Refuse stored tensors that are codes or scales.

    transformers would cast INT8 codes to FP32, a factor of 1 / scale too large, and leave the scales unread.

    Raises:
        UserError: with all offenders by kind, from the headers alone.
    """
    place = f"{inside}/" if inside else ""
    if read_model_json(name, f"{place}hf_quant_config.json", commit) is not None:
        raise UserError(
            f"the weights of model {name} are quantized already (hf_quant_config.json); give the original"
        )
    codes, scales = [], []
    for tensor, dtype in _read_headers(name, commit, place):
        if SCALES.search(tensor):
            scales.append(tensor)
        elif dtype not in FLOATS and not tensor.endswith(BUFFERS):
            codes.append(f"{tensor} in {dtype}")
    if codes or scales:
        raise UserError(
            f"the weights of model {name} are quantized already: {count_of(len(codes + scales), 'tensor')} "
            f"such as {name_list(codes[:2] + scales[:2])}; give the original model"
        )


def _read_headers(name: str, commit: str | None, place: str) -> Iterator[tuple[str, str]]:
    from safetensors import safe_open

    index = read_model_json(name, f"{place}{INDEX}", commit)
    files = sorted({*index["weight_map"].values()}) if index else [WEIGHTS]
    for file in files:
        if path := find_model_file(name, f"{place}{file}", commit):
            with safe_open(path, "np") as stored:
                for tensor in stored.keys():  # noqa: SIM118  (no mapping)
                    yield tensor, stored.get_slice(tensor).get_dtype()


def require_all_read(name: str, unread: Iterable[str], prefix: str) -> None:
    """Refuse a checkpoint with tensors that the model does not read, other than heads of another task."""
    unread = [*unread]
    if parts := sorted(key for key in unread if ADAPTERS.search(key)):
        raise UserError(
            f"model {name} has {count_of(len(parts), 'tensor')} of an adapter that is not merged into the "
            f"weights, such as {name_list(parts[:2])}; merge it (`merge_and_unload`) and save the model again"
        )
    lost = sorted(
        key
        for key in unread
        if not (HEADS.match(key.removeprefix(f"{prefix}.")) or HEADS.match(key)) and not key.endswith(BUFFERS)
    )
    if lost:
        raise UserError(
            f"model {name} has {count_of(len(lost), 'tensor')} that its config.json has no place for: "
            f"{name_list(lost)}; give a model whose weights and config.json fit"
        )
