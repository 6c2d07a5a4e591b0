"""Codes, scales, adapters and unread weights stop a model before it is loaded."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qdqbench.quantize.models.identity import model_fingerprint
from qdqbench.quantize.models.load import load_model, read_model_config
from qdqbench.quantize.utils.errors import UserError

QUERY = "bert.encoder.layer.0.attention.self.query"
LINEAR = f"{QUERY}.weight"


@pytest.fixture
def folder(tiny_bert, tmp_path):
    return shutil.copytree(tiny_bert, tmp_path / "model")


def change(folder, edit):
    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, {"format": "pt"})


def as_codes(dtype):
    def edit(weights):
        weights[LINEAR] = weights[LINEAR].mul(100).to(dtype)

    return edit


def adding(*names, shape=(4, 4)):
    return lambda weights: weights.update({name: torch.zeros(*shape) for name in names})


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
        (
            adding("bert.encoder.layer.7.output.dense.weight"),
            r"1 tensor that its config.json has no place for",
        ),
        (adding("bert.embeddings.extra_embeddings.weight", "tower.weight"), "2 tensors that its config.json"),
    ],
)
def test_weights_that_transformers_would_take_otherwise_are_refused(folder, edit, said):
    change(folder, edit)
    with pytest.raises(UserError, match=said):
        load_model(str(folder))


@pytest.mark.parametrize(
    "names",
    [
        ["bert.embeddings.position_ids"],
        ["cls.predictions.bias", "cls.seq_relationship.weight"],
        ["qa_outputs.weight"],
    ],
)
def test_heads_of_other_tasks_and_buffers_are_no_fault(folder, names):
    def edit(weights):
        weights |= {name: torch.arange(4) if "ids" in name else torch.zeros(4) for name in names}

    change(folder, edit)
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
    with pytest.raises(UserError, match="quantized already: 1 tensor"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized already .fp8, by quantization_config"),
        ({"auto_map": {"AutoModel": "modeling_mine.MineModel"}}, "code of its own .modeling_mine.MineModel"),
        ({"auto_map": {"AutoModelForMaskedLM": "org/repo--modeling_mine.Mine"}}, "code of its own"),
    ],
)
@pytest.mark.parametrize("read", [load_model, read_model_config])
def test_a_configuration_says_more_than_transformers_reads(folder, added, said, read):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | added))
    with pytest.raises(UserError, match=said):
        read(str(folder))


def test_code_that_transformers_has_itself_is_its_own(folder):
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModel": "modeling_bert.BertModel"}})
    )
    assert load_model(str(folder)) is not None


def test_a_format_of_modelopt_is_told(folder):
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "INT8"}}')
    with pytest.raises(UserError, match=r"quantized already .hf_quant_config.json."):
        load_model(str(folder))


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
    ],
)
def test_a_folder_of_something_else_is_named_with_the_next_step(tmp_path, files, said):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match=rf"{said}.*;"):
        load_model(str(tmp_path))


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
    import transformers

    from qdqbench.quantize.models.load import load_tokenizer

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(UserError, match=rf"tokenizer .* is not installed: `pip install {package}`"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**7},
        {"n_layers": 10**7},
        {"id2label": {str(number): str(number) for number in range(100_001)}},
        {"num_labels": 10**6},
    ],
)
def test_sizes_that_no_model_has_are_refused_before_it_is_made(change, folder):
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(UserError, match=rf"as {next(iter(change))} \(config\.json\), and 1\d*,000"):
        load_model(str(folder))


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_below_one_are_refused(key, value, folder):
    """-2 heads came as far as a tensor with a negative dimension, and that was a traceback."""
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {key: value}))
    with pytest.raises(UserError, match=rf"has {value} as {key} \(config\.json\), and 1 is the least"):
        load_model(str(folder))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(folder, bad):
    change(folder, lambda weights: weights[LINEAR][0].fill_(bad))
    with pytest.raises(UserError, match=rf"NaN or infinity in 1 weight, such as {LINEAR}; give a"):
        load_model(str(folder))


def test_weights_of_other_shapes_are_named(folder):
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"type_vocab_size": 9}))
    with pytest.raises(
        UserError, match=r"1 weight of another shape .*token_type_embeddings\.weight: \[\d, \d+\] in p"
    ):
        load_model(str(folder))


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_no_file(folder, file):
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match=rf"{file} stands for a file .* run `git lfs pull`"):
        load_model(str(folder))


@pytest.mark.parametrize("names", [{"0": "bad", "1": "bad"}, {"0": "bad", "5": "good"}, {"1": "a", "2": "b"}])
def test_classes_have_numbers_from_zero_and_names_of_their_own(folder, names):
    """Of two of one name an answer had the probability of the last alone."""
    about = json.loads((folder / "config.json").read_text())
    label2id = {name: int(number) for number, name in names.items()}
    (folder / "config.json").write_text(json.dumps(about | {"id2label": names, "label2id": label2id}))
    with pytest.raises(UserError, match=r"id2label in config\.json.*number them from 0"):
        load_model(str(folder))


def test_a_size_of_each_layer_is_no_number_of_layers(folder):
    about = json.loads((folder / "config.json").read_text()) | {"vocab_size_per_layer_input": 262_144}
    (folder / "config.json").write_text(json.dumps(about))
    load_model(str(folder))


def test_a_pipe_in_a_folder_is_never_read(folder):
    known = model_fingerprint(str(folder))
    os.mkfifo(folder / "x.json")
    assert model_fingerprint(str(folder)) == known
    with pytest.raises(UserError, match=r"x\.json is no regular file"):
        load_model(str(folder))
