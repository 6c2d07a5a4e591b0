"""Codes, scales, adapters, unread weights and settings of no model stop it before it is loaded."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qdqbench.quantize.models.identity import model_fingerprint
from qdqbench.quantize.models.load import load_model, load_tokenizer, read_model_config
from qdqbench.quantize.utils.errors import UserError

from ...support.refusals import edit_json, refusal

QUERY = "bert.encoder.layer.0.attention.self.query"
LINEAR = f"{QUERY}.weight"


@pytest.fixture
def folder(tiny_bert, tmp_path):
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


def change(folder, edit):
    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, {"format": "pt"})


def as_codes(dtype):
    return lambda weights: weights.update({LINEAR: weights[LINEAR].mul(100).to(dtype)})


def adding(*names):
    return lambda weights: weights.update(
        {name: torch.arange(4) if "ids" in name else torch.zeros(4, 4) for name in names}
    )


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (as_codes(torch.int8), r"already: 1 tensor such as .*query\.weight in I8; give the original"),
        (as_codes(torch.uint8), r"quantized already: .* in U8"),
        (as_codes(torch.float8_e4m3fn), r"quantized already: .* in F8_E4M3"),
        (adding(f"{LINEAR}_scale"), r"quantized already: 1 tensor such as .*weight_scale"),
        (adding(f"{LINEAR}_scale_inv"), "quantized already"),
        (adding(f"{QUERY}.input_quantizer._amax"), "quantized already"),
        (adding(f"{QUERY}.weight_zero_point"), "quantized already"),
        (adding(f"{QUERY}.SCB"), "quantized already"),
        (adding(f"{QUERY}.lora_A.default.weight"), "adapter that is not merged"),
        (adding(f"{QUERY}.base_layer.weight"), "adapter that is not merged"),
        (adding("bert.encoder.layer.0.adapter.down.weight"), "adapter that is not merged"),
        (adding("bert.encoder.layer.7.output.dense.weight"), "1 tensor that its config.json has no place"),
        (adding("bert.embeddings.extra_embeddings.weight", "tower.weight"), "2 tensors that its config.json"),
        (
            lambda weights: weights[LINEAR][0].fill_(float("nan")),
            f"NaN or infinity in 1 weight, such as {LINEAR}; give",
        ),
        (lambda weights: weights[LINEAR][0].fill_(float("inf")), "NaN or infinity in 1 weight"),
    ],
)
def test_weights_that_transformers_would_take_otherwise_are_refused(folder, edit, said):
    change(folder, edit)
    assert re.search(said, refusal(load_model, folder))


@pytest.mark.parametrize(
    "names",
    [
        ["bert.embeddings.position_ids"],
        ["cls.predictions.bias", "cls.seq_relationship.weight"],
        ["qa_outputs.weight"],
    ],
)
def test_heads_of_other_tasks_and_buffers_are_no_fault(folder, names):
    change(folder, adding(*names))
    assert load_model(str(folder)) is not None


def test_every_part_of_a_sharded_checkpoint_is_read(folder):
    weights = load_file(folder / "model.safetensors")
    names = [*weights]
    weights[names[-1]] = weights[names[-1]].to(torch.int8)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for part, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / part, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: part for part, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "quantized already: 1 tensor" in refusal(load_model, folder)


FOREIGN = [
    ({"quantization_config": {"quant_method": "fp8"}}, "quantized already .fp8, by quantization_config"),
    ({"auto_map": {"AutoModel": "modeling_mine.MineModel"}}, "code of its own .modeling_mine.MineModel"),
    ({"auto_map": {"AutoModelForMaskedLM": "org/repo--modeling_mine.Mine"}}, "code of its own"),
]
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
LARGE = [{"num_hidden_layers": 10**7}, {"n_layers": 10**7}, {"num_labels": 10**6}]
LARGE += [{"id2label": {str(number): str(number) for number in range(100_001)}}]
# of two classes of one name an answer had the probability of the last alone
CLASSES = ({"0": "bad", "1": "bad"}, {"0": "bad", "5": "good"}, {"1": "a", "2": "b"})
UNKNOWN = r" \(config\.json, key model_type\), which transformers .* update transformers"


def classes(names):
    return {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *FOREIGN,
        # -2 heads came as far as a tensor with a negative dimension, and that was a traceback
        *[({key: n}, rf"has {n} as {key} \(.*and 1 is the least") for key in SIZES for n in (0, -2)],
        *[(each, rf"as {next(iter(each))} \(config\.json\), and 1\d*,000") for each in LARGE],
        *[(classes(names), r"id2label in config\.json.*number them from 0") for names in CLASSES],
        (classes({str(number): str(number) for number in range(5)}), "2 weights of another shape"),
        ({"type_vocab_size": 9}, r"1 weight of another .*token_type_embeddings\.weight: \[\d, \d+\] in p"),
        ({"model_type": "mobilebert"}, r"is a 'mobilebert'; supported here: bert, .*\.json, key model_type"),
        ({"model_type": "nonesuch", "auto_map": {"AutoConfig": "evil.C"}}, rf"is a 'nonesuch'{UNKNOWN}"),
        ({"model_type": None, "auto_map": {"AutoConfig": "evil.C"}}, rf"is a None{UNKNOWN}"),
    ],
)
def test_a_configuration_that_no_model_here_has_is_refused(folder, changes, said):
    edit_json(folder / "config.json", **changes)
    assert re.search(said, refusal(load_model, folder))


@pytest.mark.parametrize(("changes", "said"), FOREIGN)
def test_a_configuration_alone_is_refused_too(folder, changes, said):
    edit_json(folder / "config.json", **changes)
    assert re.search(said, refusal(read_model_config, folder))


@pytest.mark.parametrize(
    "changes",
    [{"auto_map": {"AutoModel": "modeling_bert.BertModel"}}, {"vocab_size_per_layer_input": 1 << 18}],
)
def test_code_of_transformers_and_sizes_of_layers_are_no_fault(folder, changes):
    edit_json(folder / "config.json", **changes)
    assert load_model(str(folder)) is not None


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "a PEFT adapter without its model"),
        (["gliner_config.json", "model.safetensors"], "a GLiNER model"),
        (["openvino_model.xml", "openvino_model.bin", "config.json"], "an OpenVINO IR"),
        (["model.onnx", "config.json"], "an ONNX model alone"),
        (["model-q8_0.gguf"], "a GGUF file"),
        (["tf_model.h5", "config.json"], "TensorFlow weights alone"),
        (["flax_model.msgpack", "config.json"], "Flax weights alone"),
        (["meta.json", "config.cfg"], "a spaCy pipeline"),
        (["config.json", "pytorch_model.bin"], "weights in PyTorch's pickle format alone"),
        (["config.json", "onnx/model.onnx"], "an ONNX model alone"),
        (["config.json", "openvino/openvino_model.xml"], "an OpenVINO IR"),
        (["config.json", "model.safetensors", "adapter_config.json"], "an adapter next to a model"),
        (["trainer_state.json"], "it holds trainer_state.json"),
        (["checkpoint-5/config.json", "checkpoint-7/config.json"], "it holds checkpoint-5, checkpoint-7"),
        ([], "has no config.json, so it is no model; it holds nothing"),
    ],
)
def test_a_folder_of_something_else_is_named_with_the_next_step(tmp_path, files, said):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    assert re.search(rf"{said}.*;", refusal(load_model, tmp_path))


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ModuleNotFoundError("You need to install fugashi to use MecabTokenizer."), "fugashi"),
        (ImportError("You need to install sudachipy to use SudachiTokenizer."), "sudachipy"),
        (ImportError("CpmTokenizer requires the SentencePiece library"), "sentencepiece"),
        (ValueError("`tiktoken` is required. Install it with `pip install tiktoken`."), "sentencepiece"),
        (ModuleNotFoundError("No module named 'unidic_lite'", name="unidic_lite"), "unidic-lite"),
    ],
)
def test_a_library_that_a_tokenizer_needs_is_named(folder, monkeypatch, error, package):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(UserError, match=rf"tokenizer .* is not installed: `pip install {package}`"):
        load_tokenizer(str(folder))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("load", "file", "content", "said"),
    [
        (load_model, "hf_quant_config.json", b"{}", r"quantized already .hf_quant_config.json."),
        *[
            (load_model, file, POINTER, rf"{file} stands for a file .* run `git lfs pull`")
            for file in ("model.safetensors", "tokenizer.json", "config.json")
        ],
        (load_model, "config.json", b"{", "cannot load model"),
        (load_tokenizer, "tokenizer.json", b"{", "cannot load tokenizer"),
        *[(load_model, "model.safetensors", b"\0" * size, "cannot load model") for size in (0, 7, 1000)],
    ],
)
def test_a_file_with_something_else_in_it_is_one_sentence(folder, load, file, content, said):
    (folder / file).write_bytes(content)
    assert re.search(said, refusal(load, folder))


def test_weights_that_end_too_early_are_gone_or_pickled_are_never_read(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "cannot load model" in refusal(load_model, folder)
    weights.unlink()
    assert "cannot load model" in refusal(load_model, folder)
    torch.save({}, folder / "pytorch_model.bin")
    assert "safetensors" in refusal(load_model, folder)


def test_a_pipe_in_a_folder_is_never_read(folder):
    known = model_fingerprint(str(folder))
    os.mkfifo(folder / "x.json")
    assert model_fingerprint(str(folder)) == known
    assert "x.json is no regular file" in refusal(load_model, folder)
