"""The identity of a model: its files, its commit on the hub, and why it cannot be loaded."""

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from qdqbench.quantize.models.families.others import explain_other
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import read_json, sha256
from qdqbench.quantize.utils.names import COMPUTES_WITH, name_list
from qdqbench.quantize.utils.schema import Frozen
from qdqbench.quantize.utils.system.hub import HubError, commit_of
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODULES = "modules.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"  # prompts and similarity
FIELD = "sentence_embedding"  # of a model's configuration: its `Pooling`
POOLING_CLASS = "SentencePooling"  # of the module that pools
Mode = Literal["mean", "cls", "last"]
# flags of 1_Pooling/config.json, what newer files have instead, and flags of what is not supported here
FLAGS: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_MODES: dict[str, Mode] = FLAGS | {"mean": "mean", "cls": "cls", "lasttoken": "last"}
OTHER_FLAGS = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens")
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")  # of PyTorch, behind a Dense
PACKAGES = {"MeCab": "mecab-python3", "unidic_lite": "unidic-lite", "google": "protobuf"}  # of modules
_ASKS_FOR = re.compile(r"need to install (\w+) to use|requires the (\w+) library|pip install `?([\w-]+)")
_ORDER = ["Transformer", "Pooling", "Dense", "Normalize"]  # the last two may be missing
_PACKAGE = "sentence_transformers"  # whose modules are known
_EMBEDDER = "SentenceTransformer"  # what a folder of modules says that it is, where it says nothing
_SUPPORTED = "a Transformer, a Pooling (mean, cls or last token), a Dense and a Normalize, in this order"


class Dense(Frozen):
    width: int  # of the embedding
    bias: bool
    activation: str  # one of `ACTIVATIONS`


class Pooling(Frozen):
    mode: Mode
    normalize: bool = False  # to length 1
    dense: Dense | None = None


@dataclass(frozen=True)
class SentenceFolder:
    encoder: str  # folder inside of it; empty: itself
    pooling: Pooling
    dense: str = ""  # folder of the Dense
    longest: int | None = None  # tokens at which sentence-transformers cuts a text
    prompts: Mapping[str, str] = field(default_factory=dict)  # put before texts, by name
    default_prompt: str | None = None  # name
    pools_prompt: bool = True
    lower_case: bool = False


def read_sentence_folder(name: str, commit: str | None) -> SentenceFolder | None:
    """Read the settings of a sentence-transformers folder or hub model; None for another kind of model."""
    if (listed := read_model_json(name, MODULES, commit)) is None:
        return None
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "type" in each for each in listed):
        raise UserError(f"{MODULES} of model {name} is no list of modules with a type each; save it again")
    listed = [each for each in listed if not str(each["type"]).endswith(".Dropout")]  # of training alone
    kinds = [str(each["type"]).removeprefix(f"{_PACKAGE}.") for each in listed]
    modules = {
        kind.rpartition(".")[2]: str(each.get("path", "")) for kind, each in zip(kinds, listed, strict=True)
    }
    own = read_model_json(name, SENTENCE_CONFIG, commit) or {}
    says = str(own.get("model_type", _EMBEDDER))
    if says == "CrossEncoder" and modules == {"Transformer": ""}:
        return None  # a classifier as transformers has it
    there = [kind for kind in _ORDER if kind in modules]
    whole = [*modules] == there and len(listed) == len(modules) and there[:2] == _ORDER[:2]
    foreign = [each["type"] for each in listed if not str(each["type"]).startswith(f"{_PACKAGE}.")]
    if not whole or foreign or says != _EMBEDDER:
        found = name_list(
            repr((kind if kind in foreign else kind.rpartition(".")[2])[:80])[1:-1] for kind in kinds
        )
        told = f"model {name} is made of {found or 'nothing'} ({MODULES})"
        parts = [part for each in listed for part in (each["type"], *str(each["type"]).split("."))]
        wanted = f"; supported here: {_SUPPORTED}"
        if "Transformer" in modules:
            wanted += f"; to quantize its Transformer alone, copy that without {MODULES} and give --pooling"
        if says != _EMBEDDER:
            wanted = f" and is a {repr(says)[1:-1][:80]} ({SENTENCE_CONFIG}), which is not supported"
        raise UserError(f"{told}{wanted}{explain_other([says, *parts])}")
    encoder, dense = modules["Transformer"], modules.get("Dense", "")
    pooling = read_model_json(name, f"{modules['Pooling']}/config.json", commit) or {}
    files = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json")
    of_texts = (read_model_json(name, f"{encoder}/{file}", commit) for file in files)
    texts: Any = next(filter(None, of_texts), {})
    last = _dense(name, dense, commit) if dense else None
    settings = Pooling(mode=_mode(name, pooling), normalize="Normalize" in modules, dense=last)
    return SentenceFolder(
        encoder,
        settings,
        dense,
        texts.get("max_seq_length"),
        {str(key): str(prompt or "") for key, prompt in (own.get("prompts") or {}).items()},
        own.get("default_prompt_name"),
        pooling.get("include_prompt", True),
        bool(texts.get("do_lower_case")),
    )


def _mode(name: str, pooling: dict[str, Any]) -> Mode:
    named = pooling.get("pooling_mode") or []
    modes = [key for key, on in pooling.items() if key.startswith("pooling_mode_") and on]
    modes += [named] if isinstance(named, str) else named
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UserError(
            f"model {name} pools by {', '.join(modes) or 'nothing'}; supported here is one of mean, cls and "
            "last token"
        )
    return _MODES[modes[0]]


def _dense(name: str, folder: str, commit: str | None) -> Dense:
    settings = read_model_json(name, f"{folder}/config.json", commit) or {}
    activation = str(settings.get("activation_function", "torch.nn.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise UserError(
            f"model {name} has the activation {activation!r} after its Dense ({folder}/config.json); "
            f"supported here: {', '.join(ACTIVATIONS)}"
        )
    if not isinstance(settings.get("out_features"), int):
        raise UserError(f"model {name} has no out_features in {folder}/config.json; save it again")
    return Dense(width=settings["out_features"], bias=settings.get("bias", True), activation=activation)


def choose_pooling(
    name: str, folder: SentenceFolder | None, config: Any, requested: Pooling | None
) -> Pooling:
    """Choose the pooling of a model: its folder's, that of its config (`FIELD`), or the requested one."""
    saved = getattr(config, FIELD, None)
    known = folder.pooling if folder else Pooling.model_validate(saved) if saved else None
    if known is None and requested is None:
        raise UserError(
            f"model {name} does not say how it pools tokens (no {MODULES}); "
            "give --pooling mean, cls or last, and --normalize where embeddings have length 1"
            f"{explain_other(config.architectures or ())}"
        )
    if known and requested and (known.mode, known.normalize) != (requested.mode, requested.normalize):
        normal = "with" if known.normalize else "without"
        raise UserError(
            f"model {name} says itself that it pools by {known.mode}, {normal} normalization; drop --pooling "
            "and --normalize"
        )
    return cast("Pooling", known or requested)


def choose_prompts(name: str, revision: str | None, asked: Sequence[str], columns: int) -> tuple[str, ...]:
    """Return what is put before the texts of each column; empty where nothing is.

    `asked` are names that the model knows, or texts; none: the model's default.
    """
    with quiet("transformers"), explain_load_errors(name):
        folder = read_sentence_folder(name, model_commit(name, revision))
    known = folder.prompts if folder else {}
    chosen = [*asked] or ([folder.default_prompt] if folder and folder.default_prompt else [])
    if unknown := [each for each in chosen if each not in known and re.fullmatch(r"[\w-]+", each)]:
        raise UserError(
            f"model {name} has no prompt named {unknown[0]!r}; it has {name_list(known) or 'none'}. "
            "End a prompt's own text with a space or a colon"
        )
    if len(chosen) > columns:
        raise UserError(f"{len(chosen)} prompts are too many; give one for each text of a sample, {columns}")
    prompts = [known.get(each, each) for each in chosen]
    if any(prompts) and folder and not folder.pools_prompt:
        raise UserError(
            f"model {name} does not pool the tokens of a prompt (1_Pooling/config.json, key include_prompt), "
            "which is not supported; give --prompt '' for none"
        )
    return tuple(prompts * (columns // len(prompts))) if any(prompts) else ()


def find_model_file(name: str, file: str, commit: str | None) -> Path | None:
    from transformers.utils.hub import cached_file

    path = cached_file(
        name,
        file,
        revision=commit,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(path) if path else None


def read_model_json(name: str, file: str, commit: str | None) -> Any:
    path = find_model_file(name, file.lstrip("/"), commit)
    return json.loads(path.read_text(encoding="utf-8")) if path else None


def model_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit of a hub model; None for a folder."""
    if not Path(name).is_dir():
        return commit_of(name, "model", revision)
    if revision is not None:
        raise UserError(f"model {name} is a folder, which has no revision {revision!r}; drop --revision")
    return None


def read_config(name: str, commit: str | None, inside: str = "") -> Any:
    """Read the configuration of a model of any type that transformers has; `inside` is a folder of it."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, __version__

    try:
        config = AutoConfig.from_pretrained(name, revision=commit, trust_remote_code=False, subfolder=inside)
    except ValueError as error:  # of a hundred words
        given, _ = PreTrainedConfig.get_config_dict(name, revision=commit, subfolder=inside)
        if not given or given.get("model_type") in CONFIG_MAPPING:
            raise
        raise UserError(
            f"model {name} is a {given.get('model_type')!r} (config.json, key model_type), which "
            f"transformers {__version__} does not know. Code of a model's own is never run; give a model "
            f"of another type, or update transformers{explain_other([given.get('model_type')])}"
        ) from error
    listed = config.architectures or []
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise UserError(f"model {name} has architectures (config.json) that are no list of names; correct it")
    return config


def describe_model(name: str, model: "PreTrainedModel", revision: str | None = None) -> dict[str, Any]:
    """Return what results say of a loaded model; its hash tells a changed model from the old one."""
    config = model.config
    return {
        "name": name,
        "sha256": model_fingerprint(name, revision),
        "architecture": type(model).__name__,
        "num_labels": int(config.num_labels or 0),
        "problem_type": config.problem_type or ("regression" if config.num_labels == 1 else None),
        "label_names": [str(name) for _, name in sorted((config.id2label or {}).items())],
        "revision": model_commit(name, revision),
    }


def model_fingerprint(name: str, revision: str | None = None) -> str:
    """Hash the files that define a model (config, weights, tokenizer); id and commit on the hub."""
    folder = Path(name)
    digest = hashlib.sha256()
    with explain_load_errors(name):
        commit = model_commit(name, revision)
        listed = read_json(folder / MODULES) if (folder / MODULES).is_file() else []
        parts = {"", *(str(module.get("path", "")) for module in listed)}  # of sentence-transformers
    if commit is not None:
        return hashlib.sha256(f"{name}@{commit}".encode()).hexdigest()
    inside = (folder / part for part in parts if (folder / part).is_dir())
    for file in sorted(file for place in inside for file in place.iterdir()):
        if file.suffix in (".json", ".safetensors", ".txt", ".model") and file.is_file():
            digest.update(f"{file.relative_to(folder)} {sha256(file)}\n".encode())
    return digest.hexdigest()


def has_pooling(name: str, revision: str | None = None) -> bool:
    """Return whether a model says how its tokens become an embedding; False if it cannot be read.

    A `UserError` where it is made of modules that are no embedder's.
    """
    try:
        with quiet("transformers"), explain_load_errors(name):
            commit = model_commit(name, revision)
            listed = read_model_json(name, MODULES, commit) is not None
            known = FIELD in (read_model_json(name, "config.json", commit) or {})
    except UserError:  # loading says why
        return False
    if listed:
        with quiet("transformers"), explain_load_errors(name):
            return read_sentence_folder(name, commit) is not None
    return known


def embedding_notes(name: str, revision: str | None, max_length: int, prompts: Sequence[str]) -> list[str]:
    """Return what sentence-transformers would do otherwise."""
    with quiet("transformers"), explain_load_errors(name):
        folder = read_sentence_folder(name, model_commit(name, revision))
    if folder is None:
        return []
    notes = []
    if (known := [key for key, prompt in folder.prompts.items() if prompt]) and not prompts:
        notes.append(f"the model has prompts ({', '.join(known)}); --prompt puts one before each text")
    if folder.lower_case:
        notes.append("the model asks for texts in lower case; here they go to the tokenizer as they are")
    if (Path(name) / "model_head.pkl").is_file():
        notes.append("the classifier of SetFit (model_head.pkl) is not read, only the encoder below it")
    if folder.longest is not None and folder.longest < max_length:
        notes.append(
            f"texts are cut at {max_length} tokens (export.max_length); sentence-transformers would cut "
            f"those of this model at {folder.longest} (max_seq_length)"
        )
    return notes


@contextmanager
def explain_load_errors(name: str, what: str = "model") -> Iterator[None]:
    try:
        yield
    except HubError as error:
        raise UserError(f"cannot load {what} {name} ({_describe_place(name)}): {error}") from error
    except UserError:
        raise
    except Exception as error:
        missing = _missing_library(error)
        if missing in COMPUTES_WITH:  # the command line explains it
            raise
        if missing:
            package = PACKAGES.get(missing, missing)
            raise UserError(
                f"the {what} {name} needs {package}, which is not installed: `pip install {package}`"
            ) from error
        reason = " ".join(str(error).split())[:300]
        where = _describe_place(name)
        raise UserError(f"cannot load {what} {name} ({where}): {type(error).__name__}: {reason}") from error


def _missing_library(error: Exception) -> str | None:
    """Return the module that an error of transformers asks for, where it is not installed."""
    name = error.name.partition(".")[0] if isinstance(error, ImportError) and error.name else None
    if name is None and (found := _ASKS_FOR.search(str(error))):
        name = next(filter(None, found.groups())).lower()
    name = "sentencepiece" if name == "tiktoken" else name  # which transformers tries last, and names
    return name if name and find_spec(name) is None else None


def _describe_place(name: str) -> str:
    path, near = Path(name), list[str]()
    if path.is_dir():
        return "the folder"
    with suppress(OSError):
        near = difflib.get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    nearest = f", nearest is {path.parent / near[0]}" if near else ""
    return f"no such folder here{nearest}, and as a hub id"
