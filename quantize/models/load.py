"""Load a BERT-class model and its tokenizer, with an attention whose every tensor can be quantized."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from qdqbench.quantize.models import identity, stored
from qdqbench.quantize.models.attention import ATTENTION, _register_attention
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.families.others import require_encoder
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION
from qdqbench.quantize.tasks.kinds.kind import TaskKind
from qdqbench.quantize.tasks.task import kind_of
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import count_of, name_list
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LARGEST = (1 << 31) - (1 << 26)  # bytes of FP32 weights: protobuf's limit, less what else a graph holds
TANH, SAME = "gelu_pytorch_tanh", "gelu_new"  # one function, as one operator and step by step


def load_model(
    name: str,
    revision: str | None = None,
    kind: TaskKind = CLASSIFICATION,
    pooling: identity.Pooling | None = None,
) -> "PreTrainedModel":
    """Load an FP32 model with its head, in eval mode; never run code from the repository.

    Where the kind embeds, `pooling` is of an encoder that does not say itself how tokens become an embedding.
    """
    with quiet("transformers"), identity.explain_load_errors(name):
        commit = identity.model_commit(name, revision)
        folder = identity.read_sentence_folder(name, commit)
        if folder and not kind.embeds:
            raise UserError(
                f"model {name} is an embedder ({identity.MODULES}) without a head for {kind.name}; give "
                "--task embed, or fine-tune its encoder with a head"
            )
        inside = folder.encoder if folder else ""
        config = _supported_config(name, commit, inside)
        if kind.embeds:
            chosen = identity.choose_pooling(name, folder, config, pooling)
            setattr(config, identity.FIELD, chosen.model_dump(mode="json"))
        _require_head(config, name, kind)
        model, loading = _pretrained(name, kind, commit, config, subfolder=inside)
        lost = {*loading["missing_keys"]}
        if folder and folder.dense:
            from qdqbench.quantize.models.embedder import load_dense

            lost -= load_dense(model, name, folder.dense, commit)
    if lost:
        missing = name_list(sorted(lost))
        raise UserError(f"model {name} lacks weights for {missing}; fine-tune it for {kind.name} first")
    return prepare_model(model)


def use_attention(model: "PreTrainedModel", implementation: str) -> None:
    """Switch every attention of a model to `ATTENTION` or "sdpa", in place.

    ModelOpt's attention changes, while it runs, what all models of `ATTENTION` run: not for models in two
    threads. A family whose attention does not go through transformers' AttentionInterface is first made to.
    """
    if implementation == ATTENTION:
        _register_attention()
    family = family_of(model.config)
    if family.attention and not family.rewritten:
        model.set_attn_implementation(implementation)
        return
    if family.attention:
        from qdqbench.quantize.models.rewritten import use_interface

        use_interface(model)
    # transformers would not switch a rewritten one; any other stays as it is, with this mask
    model.config._attn_implementation = implementation


def prepare_model(model: "PreTrainedModel") -> "PreTrainedModel":
    """Make a model quantizable in place: FP32, eval mode, our attention, modules for sums."""
    family = family_of(model.config)
    family.require_supported(model.config, type(model).__name__)
    ask_for_answers(model.config)
    use_attention(model, ATTENTION)
    if family.given_sums:
        from qdqbench.quantize.models.rewritten import add_sums

        add_sums(model)
    made: Any = cast("Any", model).float().eval()
    if is_large(made):
        table = made.get_input_embeddings().weight
        table.data = table.data.half().float()
    return made  # type: ignore[no-any-return]


def ask_for_answers(config: Any) -> Any:
    """Let a model give its answers alone, by name, in place: a graph has an output for all that it gives."""
    config.output_attentions, config.output_hidden_states, config.return_dict = False, False, True
    return config


def is_large(model: "PreTrainedModel") -> bool:
    """Return whether FP32 weights exceed a graph, which then has the word embeddings in FP16."""
    return 4 * sum(weight.numel() for weight in model.parameters()) > LARGEST


def load_encoder(  # noqa: PLR0913
    name: str,
    kind: TaskKind,
    *,
    num_labels: int,
    classes: Sequence[str] = (),
    dropout: float | None = None,
    keep_head: bool = False,
    revision: str | None = None,
) -> "PreTrainedModel":
    """Load an FP32 encoder with a classifier to fine-tune, with PyTorch's fused attention.

    With ours where layers have windows: one may hold nothing but padding, and what fused kernels make of a
    softmax over nothing, and of its gradient, differs.

    Args:
        classes: their names; none: as the model says, or numbers.
        dropout: of hidden states and attention; None: as the model says.
        keep_head: resume the model's own classifier instead of a new one.
    """
    with quiet("transformers"), identity.explain_load_errors(name):
        commit = identity.model_commit(name, revision)
        config = _supported_config(name, commit)
        known, config.num_labels, config.problem_type = config.num_labels, num_labels, kind.problem_type
        if classes:
            config.id2label = dict(enumerate(classes))
            config.label2id = {name: number for number, name in enumerate(classes)}
        if dropout is not None:
            for field in family_of(config).dropouts:
                if getattr(config, field, None) is not None:  # none: as another field says
                    setattr(config, field, dropout)
        model, loading = _pretrained(name, kind, commit, config, new_head=True)
    use_attention(model, ATTENTION if family_of(config).windows else "sdpa")
    new_weights = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    prefix = f"{model.base_model_prefix}."
    pooler = f"{prefix}{family_of(config).pooler}."
    if lost := sorted(key for key in new_weights if key.startswith(prefix) and not key.startswith(pooler)):
        raise UserError(
            f"model {name} lacks encoder weights: {', '.join(lost[:4])}{' and more' if len(lost) > 4 else ''}"
        )
    if keep_head and any(not key.startswith(prefix) for key in new_weights):
        raise UserError(
            f"model {name} has no classifier for {num_labels} labels (it says {known}); drop --keep-head"
        )
    for key, module in model.named_children():
        if not keep_head and key != model.base_model_prefix:
            for weight in module.parameters():
                weight._is_hf_initialized = False  # else transformers leaves those that it has read
            module.apply(model._init_weights)
    return model  # type: ignore[no-any-return]


def _pretrained(
    name: str, kind: TaskKind, commit: str | None, config: Any, *, new_head: bool = False, **options: Any
) -> Any:
    """Return a model in FP32, and what transformers reports of its weights, all of which it reads."""
    import torch
    import transformers

    stored.require_plain_weights(name, commit, options.get("subfolder", ""))
    if kind.embeds:
        from qdqbench.quantize.models.embedder import make_embedder_class

        model_class: Any = make_embedder_class(config.__class__)
    else:
        model_class = getattr(transformers, kind.model_class)
    model, loading = model_class.from_pretrained(
        name,
        revision=commit,
        config=config,
        dtype=torch.float32,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # transformers' own error shows none of them
        **options,
    )
    stored.require_all_read(name, loading["unexpected_keys"], model.base_model_prefix)
    if (other := sorted(loading["mismatched_keys"])) and not new_head:
        key, found, wanted = other[0]
        raise UserError(
            f"model {name} has {count_of(len(other), 'weight')} of another shape than config.json says, such "
            f"as {key}: {[*found]} in place of {[*wanted]}; give a model whose weights and config.json fit"
        )
    if broken := [key for key, weight in model.named_parameters() if not torch.isfinite(weight).all()]:
        raise UserError(
            f"model {name} has NaN or infinity in {count_of(len(broken), 'weight')}, such as "
            f"{name_list(broken[:2])}; give a checkpoint whose training did not diverge"
        )
    return model, loading


def load_config(name: str, revision: str | None = None) -> Any:
    with quiet("transformers"), identity.explain_load_errors(name):
        commit = identity.model_commit(name, revision)
        folder = identity.read_sentence_folder(name, commit)
        return _supported_config(name, commit, folder.encoder if folder else "")


def read_class_names(name: str, revision: str | None, kind: TaskKind) -> list[str]:
    config = load_config(name, revision)
    _require_head(config, name, kind)
    return [str(label) for _, label in sorted((config.id2label or {}).items())]


def _supported_config(name: str, commit: str | None, inside: str = "") -> Any:
    config = read_plain_config(name, commit, inside)
    family_of(config, name).require_supported(config, name)
    return config


def _require_head(config: Any, name: str, kind: TaskKind) -> None:
    """Refuse a head of another kind, whose weights may have the same names."""
    own = next(iter(config.architectures or ()), "")
    if not kind.embeds and kind_of(own) is not None and not own.endswith(kind.architecture):
        raise UserError(
            f"model {name} is a {own}, but the task ({kind.name}) needs a model "
            f"...{kind.architecture}; give one fine-tuned on this task, or the --task of this model"
        )
    names = {} if kind.embeds else config.id2label or {}
    if {*names} != {*range(len(names))} or len({*names.values()}) < len(names):
        told = name_list([f"{number}: {label}" for number, label in sorted(names.items())])
        raise UserError(
            f"model {name} has classes {told} (id2label in config.json); number them from 0, and give each a "
            "name of its own"
        )


def load_tokenizer(
    name: str, revision: str | None = None, kind: TaskKind = CLASSIFICATION
) -> "PreTrainedTokenizerBase":
    """Load a fast tokenizer with a pad token."""
    from transformers import AutoTokenizer

    with quiet("transformers"), identity.explain_load_errors(name, "tokenizer"):
        commit = identity.model_commit(name, revision)
        folder = identity.read_sentence_folder(name, commit) if kind.embeds else None
        inside = folder.encoder if folder else ""
        options = {"revision": commit, "trust_remote_code": False, "use_fast": True, "subfolder": inside}
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        if kind.split_words and getattr(tokenizer, "add_prefix_space", True) is False:
            # words come one by one, and to byte-level BPE a word begins with its space
            tokenizer = AutoTokenizer.from_pretrained(name, **options, add_prefix_space=True)
    if not tokenizer.is_fast:
        raise UserError(f"model {name} has only a slow tokenizer; save it with a tokenizer.json")
    if tokenizer.vocab_size <= len(tokenizer.all_special_ids):
        # transformers makes one up when there are no files, and then every word is unknown
        raise UserError(f"model {name} has no tokenizer files; save its tokenizer next to the weights")
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"the tokenizer of model {name} has no pad token; name one in tokenizer_config.json, "
            "key pad_token"
        )
    return tokenizer


def load_matching_tokenizer(
    model: str, revision: str | None = None, kind: TaskKind = CLASSIFICATION
) -> "PreTrainedTokenizerBase":
    """Load a supported model's tokenizer, and check that it pads as the model expects."""
    tokenizer, config = load_tokenizer(model, revision, kind), load_config(model, revision)
    pad_id = tokenizer.pad_token_id
    entries = getattr(config, "vocab_size", tokenizer.vocab_size)
    if tokenizer.vocab_size > entries:
        raise UserError(
            f"the tokenizer of model {model} has {tokenizer.vocab_size} entries and the model {entries}, so "
            "it is another model's; save the model's own next to the weights"
        )
    if beyond := sorted(name for name, number in tokenizer.get_added_vocab().items() if number >= entries):
        raise UserError(
            f"the tokenizer of model {model} adds {name_list(beyond)} beyond the model's {entries} "
            "embeddings; call model.resize_token_embeddings and train, or remove them from the tokenizer"
        )
    if family_of(config).positions_follow_padding and pad_id != config.pad_token_id:
        raise UserError(
            f"the tokenizer of model {model} pads with id {pad_id}, but the model counts its positions by "
            f"pad_token_id {config.pad_token_id} of config.json; make them agree"
        )
    return tokenizer


def use_tanh_gelu(model: "PreTrainedModel", name: str) -> None:
    """Replace every GELU of the layers by its tanh form, in place.

    Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2. The forms differ by 5e-4 at most, a small part of
    an INT8 step after a feed-forward layer.
    """
    from transformers.activations import ACT2FN, GELUActivation, NewGELUActivation

    family = family_of(model.config)
    if (activation := getattr(model.config, family.activation)) == TANH:
        return
    if activation not in ("gelu", SAME):
        raise UserError(
            f"export.gelu is tanh, but model {name} computes {activation!r}; set export.gelu to exact"
        )
    for path, module in model.named_modules():
        for child, found in module.named_children():
            if isinstance(found, (GELUActivation, NewGELUActivation)) and family.place(path):
                setattr(module, child, ACT2FN[TANH])
    setattr(model.config, family.activation, TANH)


def read_model_config(name: str, revision: str | None = None) -> Any:
    with quiet("transformers"), identity.explain_load_errors(name):
        return read_plain_config(name, identity.model_commit(name, revision))


def read_plain_config(name: str, commit: str | None, inside: str = "") -> Any:
    """Read the configuration of a model that is not quantized yet and needs no code of its own."""
    stored.require_model_folder(name)
    config = ask_for_answers(identity.read_config(name, commit, inside))
    stored.require_plain_config(name, config.to_dict())
    return config


def create_untrained(name: str, config: Any) -> "PreTrainedModel":
    """Create an encoder of the configuration's own class, with a classifier where that has no head."""
    with quiet("transformers"), identity.explain_load_errors(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers of no width, in MobileBERT
        require_encoder(config, name)
        made = _find_class(config)
        _require_small(name, made, config)
        model = made._from_config(config, attn_implementation="eager").eval()
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = 0  # some classifiers look for the last token that is none
    return model  # type: ignore[no-any-return]


def _require_small(name: str, model_class: Any, config: Any) -> None:
    """Refuse a model that no ONNX file holds, before its memory is taken."""
    import torch

    weights = 0
    with suppress(Exception), torch.device("meta"):  # some cannot be made without memory
        weights = sum(weight.numel() for weight in model_class(config).parameters())
    if 2 * weights > LARGEST:
        raise UserError(
            f"model {name} is a {config.model_type!r} of {weights / 1e9:.1f} billion weights, more than an "
            "ONNX file holds; give a smaller one"
        )


def _find_class(config: Any) -> Any:
    import transformers

    for name in config.architectures or ():
        own = getattr(transformers, name, None)
        if "For" in name and own is not None and issubclass(own, transformers.PreTrainedModel):
            return own
    heads = getattr(transformers, CLASSIFICATION.model_class)._model_mapping
    mapping = heads if type(config) in heads else transformers.AutoModel._model_mapping
    if type(config) not in mapping:
        raise UserError(f"transformers has no model for the type {config.model_type!r}")
    return mapping[type(config)]
