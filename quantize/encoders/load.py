"""Load a BERT-class classifier and its tokenizer, with an attention whose every tensor can be quantized."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.files import sha256
from qdqbench.quantize.encoders.attention import ATTENTION, _register_attention
from qdqbench.quantize.families.known import family_of
from qdqbench.quantize.machine.hub import HubError, commit_of
from qdqbench.quantize.machine.quiet import quiet
from qdqbench.quantize.tasks.classification import CLASSIFICATION
from qdqbench.quantize.tasks.kind import TaskKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model's identity."""

    name: str
    sha256: str  # of config and weights, so that a changed model is never mistaken for the old one
    architecture: str
    num_labels: int
    problem_type: str | None
    label_names: list[str]
    revision: str | None = None  # commit of a hub model


def load_model(name: str, revision: str | None = None, kind: TaskKind = CLASSIFICATION) -> "PreTrainedModel":
    """FP32 model with its head, in eval mode, from a folder or a hub id; never runs code from the repository.

    `revision` is the branch, tag or commit of a hub model; None: its default branch.

    Raises:
        UserError: not found, no classifier head in the weights, or an unsupported architecture.
    """
    _register_attention()
    with quiet("transformers"), _explained(name):
        commit = model_commit(name, revision)
        config = _supported_config(name, commit)
        _require_replaceable(config, name)
        model, loading = _pretrained(name, kind, commit, config, attn_implementation=ATTENTION)
    lost = sorted(loading["missing_keys"])
    if lost:
        raise UserError(
            f"model {name} lacks weights for {', '.join(lost[:4])}{' and more' if len(lost) > 4 else ''}: it "
            f"is not fine-tuned for {kind.name}; fine-tune it first"
        )
    _add_sums(model)
    return model.eval()  # type: ignore[no-any-return]


def prepare_model(model: "PreTrainedModel") -> "PreTrainedModel":
    """Make a classifier in memory like one of `load_model`, in place: FP32, eval mode, its attention.

    Raises:
        UserError: an unsupported architecture.
    """
    _require_replaceable(model.config, type(model).__name__)
    _register_attention()
    model.set_attn_implementation(ATTENTION)
    _add_sums(model)
    return cast("Any", model).float().eval()  # type: ignore[no-any-return]


def _add_sums(model: "PreTrainedModel") -> None:
    if family_of(model.config).given_sums:
        from qdqbench.quantize.encoders.sums import add_sums

        add_sums(model)


def load_encoder(  # noqa: PLR0913
    name: str,
    kind: TaskKind,
    *,
    num_labels: int,
    dropout: float | None = None,
    keep_head: bool = False,
    revision: str | None = None,
) -> "PreTrainedModel":
    """FP32 encoder with a classifier to fine-tune, with PyTorch's fused attention.

    Args:
        name: folder or hub id, of an encoder or of a classifier; revision as `load_model`.
        num_labels: of the classifier; 1 for regression.
        dropout: of hidden states and attention; None: as the model says.
        keep_head: go on with the model's own classifier instead of a new one.

    Raises:
        UserError: not found, unsupported, without encoder weights, or no such classifier to keep.
    """
    with quiet("transformers"), _explained(name):
        commit = model_commit(name, revision)
        config = _supported_config(name, commit)
        known = config.num_labels
        config.num_labels = num_labels
        config.problem_type = kind.problem_type
        if dropout is not None:
            for field in family_of(config).dropouts:
                if getattr(config, field, None) is not None:  # none: as another field says
                    setattr(config, field, dropout)
        model, loading = _pretrained(
            name, kind, commit, config, attn_implementation="sdpa", ignore_mismatched_sizes=True
        )
    made = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    prefix = f"{model.base_model_prefix}."
    pooler = f"{prefix}{family_of(config).pooler}."
    if lost := sorted(key for key in made if key.startswith(prefix) and not key.startswith(pooler)):
        raise UserError(
            f"model {name} lacks encoder weights: {', '.join(lost[:4])}{' and more' if len(lost) > 4 else ''}"
        )
    head = [module for key, module in model.named_children() if key != model.base_model_prefix]
    if keep_head and any(not key.startswith(prefix) for key in made):
        raise UserError(
            f"model {name} has no classifier for {num_labels} labels (it says {known}) that could be kept; "
            "drop --keep-head"
        )
    if not keep_head:
        for module in head:
            model._init_weights(module)
    return model  # type: ignore[no-any-return]


def _pretrained(name: str, kind: TaskKind, commit: str | None, config: Any, **options: Any) -> Any:
    """A model in FP32, and what transformers tells of its weights."""
    import torch
    import transformers

    return getattr(transformers, kind.model_class).from_pretrained(
        name,
        revision=commit,
        config=config,
        dtype=torch.float32,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )


def model_commit(name: str, revision: str | None = None) -> str | None:
    """Commit of a hub model; None for a folder.

    Raises:
        UserError: it cannot be found out, or a folder is given with a revision.
    """
    if not Path(name).is_dir():
        return commit_of(name, "model", revision)
    if revision is not None:
        raise UserError(f"model {name} is a folder, which has no revision {revision!r}; drop --revision")
    return None


def _supported_config(name: str, commit: str | None) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, revision=commit, trust_remote_code=False)
    family_of(config, name)
    return config


def _require_replaceable(config: Any, name: str) -> None:
    family = family_of(config, name)
    if family.sliding_window or not family.attention_interface:
        raise UserError(
            f"model {name} is a {config.model_type!r}, whose attention cannot be replaced by one that "
            "can be quantized"
        )


def load_tokenizer(name: str, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """Fast tokenizer of the model; name and revision as `load_model`.

    Raises:
        UserError: no tokenizer files, or only a slow tokenizer.
    """
    from transformers import AutoTokenizer

    with quiet("transformers"), _explained(name, "tokenizer"):
        commit = model_commit(name, revision)
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=commit, trust_remote_code=False, use_fast=True
        )
    if not tokenizer.is_fast:
        raise UserError(f"model {name} has only a slow tokenizer; save it with a tokenizer.json")
    if tokenizer.vocab_size <= len(tokenizer.all_special_ids):
        # transformers makes one up when there are no files, and then every word is unknown
        raise UserError(f"model {name} has no tokenizer files; save its tokenizer beside the weights")
    return tokenizer


def describe_model(name: str, model: "PreTrainedModel", revision: str | None = None) -> ModelInfo:
    """Identity of a loaded model; for a folder the hash covers its config and safetensors files."""
    config = model.config
    problem = config.problem_type or ("regression" if config.num_labels == 1 else None)
    return ModelInfo(
        name=name,
        sha256=model_fingerprint(name, revision),
        architecture=type(model).__name__,
        num_labels=int(config.num_labels or 0),
        problem_type=problem,
        label_names=[str(name) for _, name in sorted((config.id2label or {}).items())],
        revision=model_commit(name, revision),
    )


def model_fingerprint(name: str, revision: str | None = None) -> str:
    """SHA-256 over the files that define a model: config, weights, tokenizer; of id and commit on the hub.

    Raises:
        UserError: the commit of a hub model cannot be found out.
    """
    folder = Path(name)
    digest = hashlib.sha256()
    with _explained(name):
        commit = model_commit(name, revision)
    if commit is not None:
        return hashlib.sha256(f"{name}@{commit}".encode()).hexdigest()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors", ".txt"):
            digest.update(f"{file.name} {sha256(file)}\n".encode())
    return digest.hexdigest()


def use_tanh_gelu(model: "PreTrainedModel", name: str) -> None:
    """Replace every GELU by its tanh form, in place (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2).

    The forms differ by 5e-4 at most, a small part of an INT8 step behind a feed-forward layer.

    Raises:
        UserError: the model's activation is not the exact GELU.
    """
    from transformers.activations import ACT2FN, GELUActivation

    field = family_of(model.config).activation
    activation = getattr(model.config, field)
    if activation == TANH:
        return
    if activation != "gelu":
        raise UserError(
            f"export.gelu is tanh, but model {name} computes {activation!r} in its feed-forward "
            "layers; set export.gelu to exact"
        )
    for module in model.modules():
        for child, found in module.named_children():
            if isinstance(found, GELUActivation):
                setattr(module, child, ACT2FN[TANH])
    setattr(model.config, field, TANH)


@contextmanager
def _explained(name: str, what: str = "model") -> Iterator[None]:
    """Turn the many ways in which a load fails into one sentence."""
    where = "the folder" if Path(name).is_dir() else "no such folder here, and as a hub id"
    try:
        yield
    except HubError as error:
        raise UserError(f"cannot load {what} {name} ({where}): {error}") from error
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot load {what} {name} ({where}): {type(error).__name__}: {reason}") from error
