"""A tiny model of any architecture that transformers has, taken through a run as its owner would."""

import json
import re
import warnings
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from qdqbench.quantize.utils.system.quiet import quiet

from .families import SIZES
from .unknown import UNKNOWN

LAYERS, HIDDEN, HEADS, INTERMEDIATE, POSITIONS, ENTRIES = 2, 32, 2, 64, 128, 64
SMALL = ["--set", "engine.shapes=[{batch: [1, 4, 8], length: [8, 32, 32]}]"]
SMALL += ["--set", "export.max_length=32", "--set", "calibration.batch_size=8"]
OTHER_LENGTHS = (3,), (5, 20, 9), (60, 2)  # of the texts of batches
MOST = 20_000_000  # weights of what counts as tiny
WORDS = ("good", "bad", "fine", "poor", "a", "the", "film", "plot", "is", "was", "very", "not", "and", "but")
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
FIELDS = (  # of sizes, by patterns of their names; the first counts
    (r"vocab(ulary)?_size|^char_vocab", ENTRIES),
    (r"heads?(_kv)?$|^n_head", HEADS),
    (r"head_dim|d_kv|head_size|d_head", HIDDEN // HEADS),
    (r"position_embeddings$|n_positions|n_ctx|max_(seq|sequence|source|target)", POSITIONS),
    (r"layers?$|^n_layer|num_blocks|depth$", LAYERS),
    (r"intermediate|ffn|d_ff|d_inner|n_inner|hidden_dim$|mlp_dim|feedforward", INTERMEDIATE),
    (r"hidden_size|d_model|^dim$|embed(ding)?_(size|dim)|n_embd|emb_dim|d_embed|projection_dim", HIDDEN),
    (r"num_(local_)?experts$|n_routed_experts", 4),
    (r"experts_per_tok|num_experts_per", 2),
)


class Head(NamedTuple):
    """A kind of model, by its class, its name in transformers' mappings and the options of its run."""

    auto: str
    mapping: str
    task: tuple[str, ...]
    data: str
    until: str = "export"  # the last stage; one classifier and one embedder of each type go through them all


_EMBED = ("--task", "embed", "--pooling", "mean")
HEAD_KINDS = {
    "classification": Head(
        "AutoModelForSequenceClassification", "FOR_SEQUENCE_CLASSIFICATION_", (), "rows", "evaluate"
    ),
    "tokens": Head(
        "AutoModelForTokenClassification", "FOR_TOKEN_CLASSIFICATION_", ("--task", "tokens"), "ner"
    ),
    "questions": Head("AutoModelForQuestionAnswering", "FOR_QUESTION_ANSWERING_", ("--task", "qa"), "qa"),
    "masked": Head("AutoModelForMaskedLM", "FOR_MASKED_LM_", _EMBED, "lines.txt"),
    "embedding": Head("AutoModel", "", _EMBED, "lines.txt", "evaluate"),
}


def model_types(head):
    """Return the model types that transformers has with a head, without other names of one type."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, f"MODEL_{HEAD_KINDS[head].mapping}MAPPING_NAMES")
    return [each for each in names if CONFIG_MAPPING[each].model_type == each]


def write_data(folder):
    """Write rows of every kind of task that a head has."""
    random = np.random.default_rng(0)

    def words(count):
        return [str(word) for word in random.choice(WORDS, count)]

    def rows(count):
        texts = [words(int(random.integers(3, 12))) for _ in range(count)]
        answers = [{"text": [text[1]], "answer_start": [len(text[0]) + 1]} for text in texts]
        return {
            "rows": [{"text": " ".join(text), "label": n % 2} for n, text in enumerate(texts)],
            "ner": [{"tokens": text, "ner_tags": [n % 2 for n, _ in enumerate(text)]} for text in texts],
            "qa": [
                {"id": str(n), "question": "is it", "context": " ".join(text), "answers": answer}
                for n, (text, answer) in enumerate(zip(texts, answers, strict=True))
            ],
        }

    for split, count in (("train", 24), ("validation", 16)):
        for name, listed in rows(count).items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            text = "".join(f"{json.dumps(row)}\n" for row in listed)
            (folder / name / f"{split}.jsonl").write_text(text)
    lines = (" ".join(words(int(random.integers(3, 12)))) for _ in range(24))
    (folder / "lines.txt").write_text("".join(f"{line}\n" for line in lines))
    return folder


def shrink(config):
    """Make the sizes of a configuration and of its parts tiny, in place."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value)
        elif name.endswith("layer_types") and isinstance(value, list):
            setattr(config, name, [*value[:1], *value[1 - LAYERS :]])
        elif type(value) is int:
            small = next((size for pattern, size in FIELDS if re.search(pattern, name)), value)
            with suppress(Exception):  # a field that another one decides
                setattr(config, name, min(value, small))
    return config


def tiny_config(model_type):
    """Return a configuration of a type; of sizes that depend on one another, transformers' own."""
    from transformers import AutoConfig

    given = SIZES.get(model_type) or UNKNOWN.get(model_type)
    if given is not None:
        return AutoConfig.for_model(model_type, vocab_size=ENTRIES, **given)
    config = shrink(AutoConfig.for_model(model_type))
    for name, value in list(vars(config).items()):  # ids of a vocabulary that large
        if name.endswith("_token_id") and type(value) is int and not 0 <= value < ENTRIES:
            setattr(config, name, 0 if name == "pad_token_id" else 3)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    return config


def write_tokenizer(folder, pad):
    """Write a tokenizer of whole words, with the padding at its id."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    entries = [*[*SPECIAL.values()][1:], *WORDS]
    entries += [f"w{number}" for number in range(ENTRIES - 1 - len(entries))]
    entries.insert(pad, SPECIAL["pad_token"])
    ids = {word: number for number, word in enumerate(entries)}
    made = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL["unk_token"]))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    ends = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=POSITIONS, model_input_names=inputs, **SPECIAL
    ).save_pretrained(folder)


def write_unigram(folder, texts):
    """Write a tokenizer as that of XLM-R: pieces of words, another padding, no types of tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=ENTRIES, special_tokens=special, unk_token="<unk>")
    made.train_from_iterator([*texts, *WORDS], trainer)
    ends = [("<s>", 0), ("</s>", 2)]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", ends)
    PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=POSITIONS, bos_token="<s>", cls_token="<s>", eos_token="</s>",
        sep_token="</s>", unk_token="<unk>", pad_token="<pad>", mask_token="<mask>",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip


def write_model(folder, model_type, head):
    """Write a tiny model with wide random weights; of a type that has no tiny one its configuration alone."""
    import torch
    import transformers

    folder.mkdir(parents=True)
    pad = 0
    with quiet("transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers of no width, in MobileBERT
        try:
            config = tiny_config(model_type)
            found = getattr(transformers, HEAD_KINDS[head].auto)._model_mapping[type(config)]
            made = found[0] if isinstance(found, (tuple, list)) else found
            with torch.device("meta"):
                assert sum(weight.numel() for weight in made(config).parameters()) < MOST
            model = made(config).eval()
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
            model.save_pretrained(folder)
            transformers.AutoConfig.from_pretrained(folder)
            pad = int(getattr(config, "pad_token_id", 0) or 0)
        except Exception:
            text = json.dumps({"model_type": model_type})
            with suppress(Exception):
                text = transformers.AutoConfig.for_model(model_type).to_json_string()
            (folder / "config.json").write_text(text)
    write_tokenizer(folder, pad)


class Outcome(NamedTuple):
    """What a run made of a model."""

    reason: str  # why it was refused; empty: it was served
    gap: float = 0.0  # largest difference of FP32 logits, ONNX minus transformers


def take(folder, data, model_type, head):
    """Take a type through a run, by the recipe that its refusal asks for; AssertionError: a third outcome."""
    from qdqbench.quantize.models.families import known

    from ..integration.tiny import call_alone

    known._DESCRIBED.clear()  # a recipe of an earlier type, in the same process
    model, out, recipe = folder / "model", folder / "out", folder / "recipe.yaml"
    write_model(model, model_type, head)
    kind = HEAD_KINDS[head]
    options = ["--model", model, *kind.task, "--data", data / kind.data, "--backend", "onnxruntime"]
    options += ["--until", kind.until, "--out", out, *SMALL]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = call_alone("run", *options)
        if "recipes new" in done.err:
            done = call_alone("recipes", "new", "--model", model, "--out", recipe)
            if done.code == 0:
                done = call_alone("run", recipe, *options)
    said = [line for line in done.err.splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)]  # progress
    if done.code == 0:
        assert said == [], (model_type, said)
        return Outcome("", gap(model, out / "model.fp32.onnx", head))
    assert done.code == 1, (model_type, done)
    assert len(said) == 1, (model_type, done)
    assert model_type in said[0], (model_type, said)  # its name
    assert "unexpected failure" not in said[0], (model_type, said)
    return Outcome(_reason(said[0], model, model_type))


def _reason(said, model, model_type):
    """Return a refusal without the names of the model, its details and its next step."""
    text = said.removeprefix("qdqbench: ").replace(str(model), "MODEL").replace(model_type, "TYPE")
    text = re.sub(r"^(model MODEL is )?an? 'TYPE',? ", "", text)
    return re.split(r"; |: |\. ", re.sub(r" \([^()]*(\([^()]*\)[^()]*)*\)", "", text))[0]


def gap(model, graph, head, words=OTHER_LENGTHS):
    """Return the largest difference of the outputs on texts of other lengths than those of the run."""
    import inspect

    import onnxruntime
    import torch
    import transformers

    kind = "AutoModel" if head == "masked" else HEAD_KINDS[head].auto
    with quiet("transformers"):
        original = getattr(transformers, kind).from_pretrained(model, attn_implementation="eager").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession(str(graph))
    taken, worst = inspect.signature(original.forward).parameters, 0.0
    for lengths in words:
        texts = [" ".join(WORDS[(3 * n + length) % len(WORDS)] for n in range(length)) for length in lengths]
        given = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            found = original(**{name: value for name, value in given.items() if name in taken})
        mask = given["attention_mask"]
        if kind == "AutoModel":
            weights = mask[..., None].float()
            expected = [((found[0] * weights).sum(1) / weights.sum(1)).numpy()]
        elif head == "questions":
            expected = [found.start_logits.numpy(), found.end_logits.numpy()]
        else:
            expected = [found.logits.numpy()]
        names = [each.name for each in session.get_inputs()]
        none = torch.zeros_like(mask)  # of types of tokens, which not every tokenizer gives
        got = session.run(None, {name: given.get(name, none).numpy() for name in names})
        if len(got) != len(expected):
            got = [got[0][..., column] for column in range(len(expected))]
        kept = mask.numpy().astype(bool) if head in {"tokens", "questions"} else slice(None)
        worst = max(
            [worst, *(float(np.abs(a[kept] - b[kept]).max()) for a, b in zip(got, expected, strict=True))]
        )
    return worst
