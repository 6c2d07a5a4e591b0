"""What the Hub and its libraries read of a deployed folder: configuration, tokenizer, modules and card."""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import onnx
import yaml

from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.graph.export import save
from qdqbench.quantize.graph.index import GraphIndex, attribute, rename_tensors
from qdqbench.quantize.models import identity
from qdqbench.quantize.models.load import load_config
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.tasks.data.splits import hub_set, is_hub_source
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION, REGRESSION
from qdqbench.quantize.tasks.kinds.embedding import PAIRS, TEXTS_ALONE
from qdqbench.quantize.tasks.kinds.multilabel import MULTI_LABEL
from qdqbench.quantize.tasks.kinds.questions import QUESTIONS
from qdqbench.quantize.tasks.kinds.reranking import RERANKING
from qdqbench.quantize.tasks.kinds.tokens import TOKENS
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.system.quiet import quiet

INT8, PLAIN = "onnx/model_quantized.onnx", "onnx/model.onnx"  # where transformers.js and others look
IR = "openvino/openvino_model.xml"
HIDDEN = "last_hidden_state"  # output that libraries pool by themselves
# tasks and metrics as the Hub calls them; a metric without an entry has its own name
PIPELINES = {
    CLASSIFICATION.name: "text-classification",
    REGRESSION.name: "text-classification",
    MULTI_LABEL.name: "text-classification",
    RERANKING.name: "text-ranking",
    TOKENS.name: "token-classification",
    QUESTIONS.name: "question-answering",
    PAIRS.name: "sentence-similarity",
    TEXTS_ALONE.name: "sentence-similarity",
}
METRICS = {
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "f1_micro": "f1",
    "f1_macro": "f1",
}
SENTENCE = "sentence_transformers.models"  # a name of these classes that all its versions read
DROPPED = ("auto_map", "is_local", "local_files_only")  # code of the model's own, where it was read
MOST_CARD_BYTES = 1 << 20
# a plain value of a line: as YAML, a card from anywhere could expand aliases or hold what its reader fails at
_LICENSE = re.compile(
    r"^(license|license_name):[ \t]+([\"']?)(\w[^\n\"'#]{0,200})\2[ \t]*(?:#.*)?$", re.MULTILINE
)
_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
_BASE = re.compile(rf"^base_model:[ \t]*(?:\n-[ \t]+)?[\"']?({_NAME.pattern})[\"']?[ \t]*$", re.MULTILINE)
_FOLDERS = ("model", "models", "old_models", "output", "outputs", "checkpoints", "results", "runs", "tmp")


class MeasuredRun(Protocol):
    """A folder's record of its run: `Results`, which the evaluation makes."""

    model: dict[str, Any]
    data: dict[str, Any]
    engine: EngineResult | None
    gpu_engine: EngineResult | None
    stages: dict[str, Any]
    verification: Any
    gate: Any


def describe_config(session: Session, results: MeasuredRun, labels: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of what is deployed: its class and labels, where the model's has others."""
    config, kind = load_config(session.model_name, session.config.revision), session.config.task.kind
    # TEI asks for these names, and some types have others
    sizes = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers")}
    known = sizes | json.loads(config.to_json_string())
    about: dict[str, Any] = {key: value for key, value in known.items() if key not in DROPPED}
    architecture = str(results.model["architecture"])
    if kind.embeds:
        architecture = f"{architecture.removesuffix(kind.architecture)}Model"
    elif architecture.endswith("Classification"):
        named = dict(enumerate(labels)) or config.id2label
        about["id2label"] = {str(number): str(name) for number, name in sorted(named.items())}
        about["label2id"] = {name: int(number) for number, name in about["id2label"].items()}
    about["architectures"] = [architecture]
    if kind in (CLASSIFICATION, REGRESSION, MULTI_LABEL):
        about["problem_type"] = kind.problem_type
    if kind is REGRESSION:  # else CrossEncoder would answer the sigmoid of the score
        about.setdefault("sentence_transformers", {"activation_fn": "torch.nn.modules.linear.Identity"})
    if session.recipe.quantizes:
        about["transformers.js_config"] = {"dtype": "q8"}
    return about


def save_tokenizer(session: Session, length: int) -> dict[str, bytes]:
    """Return the files of the tokenizer, which cuts at the length that was evaluated."""
    tokenizer: Any = session.tokenizer
    backend = tokenizer.backend_tokenizer  # transformers sets both with each call, others do not
    backend.enable_truncation(length, direction=tokenizer.truncation_side)
    backend.enable_padding(
        direction=tokenizer.padding_side, pad_id=tokenizer.pad_token_id, pad_token=tokenizer.pad_token
    )
    with tempfile.TemporaryDirectory(prefix="qdqbench-tokenizer-") as saved:
        tokenizer.save_pretrained(saved)
        paths = sorted(path for path in Path(saved).rglob("*") if path.is_file())
        content = {path.relative_to(saved).as_posix(): path.read_bytes() for path in paths}
    about = json.loads(content["tokenizer_config.json"])
    about = {key: value for key, value in about.items() if key not in DROPPED}
    about["model_max_length"] = about["max_length"] = length
    if about["tokenizer_class"] == "TokenizersBackend":  # its name since transformers 5
        about["tokenizer_class"] = "PreTrainedTokenizerFast"
    longest = {"max_seq_length": length, "do_lower_case": False}  # for TEI and sentence-transformers
    return content | {
        "tokenizer_config.json": encode(about),
        "sentence_bert_config.json": encode(longest),
    }


def describe_sentences(session: Session, pooling: identity.Pooling) -> dict[str, bytes]:
    """Return the files that make an embedding model one of sentence-transformers."""
    name, revision = session.model_name, session.config.revision
    width, commit = load_config(name, revision).hidden_size, identity.model_commit(name, revision)
    kinds = ["Transformer", "Pooling", *["Dense"] * bool(pooling.dense), *["Normalize"] * pooling.normalize]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], start=1))]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{SENTENCE}.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    mode = next(flag for flag, known in identity.FLAGS.items() if known == pooling.mode)
    flags = {flag: flag == mode for flag in (*identity.FLAGS, *identity.OTHER_FLAGS)}
    content = {
        "modules.json": encode(modules),
        "1_Pooling/config.json": encode({"word_embedding_dimension": width, **flags}),
    }
    if pooling.dense:
        content |= _describe_dense(session, pooling.dense, width, commit)
    known = identity.find_model_file(name, identity.SENTENCE_CONFIG, commit)
    text = files.read_bounded(known, MOST_CARD_BYTES, "a settings file", "another") if known else "{}"
    own, task = json.loads(text), session.config.task
    kept = own.get("prompts") or {}
    # what was evaluated has a name too, which encode_query and encode_document look for
    added = {
        name: prompt
        for name, prompt in zip(("query", "document"), task.prompts, strict=False)
        if prompt not in kept.values() and not kept.get(name)
    }
    if known or added:
        about = own | {"prompts": kept | added} if added else own
        content[identity.SENTENCE_CONFIG] = encode(about)
    return content


def _describe_dense(
    session: Session, dense: identity.Dense, width: int, commit: str | None
) -> dict[str, bytes]:
    from safetensors.numpy import load_file, save

    name, file, prefix = session.model_name, "model.safetensors", "pooling.dense."
    if trainings := session.recipe.trainings:
        name, commit = str(session.folder / trainings[-1] / "model"), None
    elif folder := identity.read_sentence_folder(name, commit):
        file, prefix = f"{folder.dense}/{file}", "linear."
    source = identity.find_model_file(name, file, commit)
    assert source is not None  # the model was loaded from it
    weights = load_file(source)
    kept = {f"linear.{key}": weights[f"{prefix}{key}"] for key in ("weight", *["bias"] * dense.bias)}
    module = "linear" if dense.activation == "Identity" else "activation"
    about = {
        "in_features": width,
        "out_features": dense.width,
        "bias": dense.bias,
        "activation_function": f"torch.nn.modules.{module}.{dense.activation}",
    }
    return {"2_Dense/config.json": encode(about), "2_Dense/model.safetensors": save(kept)}


def add_hidden_state(source: Path, target: Path, recipe: str, width: int) -> Path:
    """Write the graph of an embedding model with its last hidden state as first output, and return its path.

    Names change, and no operator is added: the tensor is what the pooling reads.
    """
    model = onnx.load(source)
    index = GraphIndex(model)
    pools = [node for node in index.graph.node if node.name.startswith("/pooling/")]
    inside = {name for node in pools for name in node.output}
    read = [
        (name, node)
        for node in pools
        for name in node.input
        if name in index.producers and name not in inside and index.producers[name].op_type != "Constant"
    ]
    if len({name for name, _ in read}) != 1:
        raise CheckFailed(f"the pooling of {source} does not read one tensor; export the model again")
    name, first = read[0]
    if first.op_type == "Cast" and attribute(first, "to") == onnx.TensorProto.FLOAT:
        name = first.output[0]  # of an encoder in FP16
    rename_tensors(index.graph.node, {name: HIDDEN}, outputs=True)
    shape: list[str | int | None] = ["batch", "length", width]
    index.graph.output.insert(0, onnx.helper.make_tensor_value_info(HIDDEN, onnx.TensorProto.FLOAT, shape))
    save(model, target, recipe)
    return target


def _read_head(name: str, revision: str | None) -> str:
    """Return the metadata of a model card; empty where there is none that can be read."""
    try:
        with quiet("transformers"):
            card = identity.find_model_file(name, "README.md", identity.model_commit(name, revision))
        text = files.read_bounded(Path(card), MOST_CARD_BYTES, "a model card", "another") if card else ""
    except Exception:
        return ""
    head, end, _ = text.removeprefix("---\n").partition("\n---")
    return head if end and text.startswith("---\n") else ""


def read_license(name: str, revision: str | None) -> dict[str, str]:
    """Return `license` and `license_name` of a model card, where they are plain values."""
    found = _LICENSE.findall(_read_head(name, revision))
    values = {key: " ".join(value.split())[:100] for key, _, value in found}
    return {key: value for key, value in values.items() if value}


def find_base(model: str) -> dict[str, str]:
    """Return the model of the Hub that a model is or was made of, by its card or its configuration."""
    if not Path(model).exists():
        return {"base_model": model, "base_model_relation": "quantized"}
    told = _BASE.search(_read_head(model, None))
    about = identity.read_model_json(model, "config.json", None) or {}
    base = told[1] if told else str(about.get("_name_or_path"))
    owner, _, name = base.partition("/")
    return {"base_model": base} if _NAME.fullmatch(base) and name and owner not in _FOLDERS else {}


def find_license(name: str, revision: str | None) -> str | None:
    values = read_license(name, revision)
    return values.get("license_name", values.get("license"))


def describe_card(session: Session, results: MeasuredRun, *, title: str, openvino: bool) -> str:
    """Return the metadata of the model card as YAML: what is known, and what was measured."""
    config, quantizes = session.config, session.recipe.quantizes
    kind, data = config.task.kind, str(results.data.get("source", ""))
    base = find_base(config.model) if config.model else {}
    scores = kind.embeds or kind in (REGRESSION, RERANKING)  # transformers.js would answer their softmax
    repository, subset, _ = hub_set(config.task, data) if is_hub_source(data) else (None, "", None)
    stages = ((name, results.stages.get(name)) for name in ("engine", "onnxruntime"))
    measured = next(((name, row) for name, row in stages if row and row.status == "done"), None)
    metrics = [*dict.fromkeys(METRICS.get(name, name) for name in config.task.metrics)]
    card: dict[str, Any] = {
        **{key: value for key, value in base.items() if quantizes or key == "base_model"},
        "library_name": "sentence-transformers" if scores else "transformers.js",
        "pipeline_tag": PIPELINES[kind.name],
        **read_license(session.model_name, config.revision),
        **({"datasets": [repository]} if repository else {}),
        "metrics": metrics,
        "tags": ["onnx", *["openvino"] * openvino, *["int8"] * quantizes, "qdqbench"],
    }
    if measured:
        name, row = measured
        dataset = {"type": repository or config.task.name, "name": config.task.name}
        splits = config.task.eval_splits
        dataset |= {"config": subset} if subset else {}
        dataset |= {"split": splits[0]} if len(splits) == 1 else {}
        dataset |= {"revision": results.data["revision"]} if results.data.get("revision") else {}
        values = [
            {
                "type": METRICS.get(metric, metric),
                "value": value,
                "name": f"{metric} of {name}, n = {row.n}",
            }
            for metric, value in row.metrics.items()
        ]
        task = {"type": PIPELINES[kind.name]}
        card["model-index"] = [
            {"name": title, "results": [{"task": task, "dataset": dataset, "metrics": values}]}
        ]
    return str(yaml.safe_dump(card, sort_keys=False, allow_unicode=True))


def encode(about: Any) -> bytes:
    return (json.dumps(about, indent=2, ensure_ascii=False) + "\n").encode()
