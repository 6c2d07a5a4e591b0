"""A tiny sentence-transformers folder, and its embeddings by NumPy."""

import json
import shutil

import numpy as np
import numpy.typing as npt

from .tiny_bert import HIDDEN, new_bert, write_tiny_bert

MEAN, CLS, LAST = "pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_lasttoken"
KINDS = "sentence_transformers.models"
Floats = npt.NDArray[np.float64]


def write_sentence_folder(folder, mode=MEAN, *, normalize=True, dense=None, inside="", modules=(), **pooling):
    """What sentence-transformers saves.

    Args:
        folder: gets it.
        mode: flag of 1_Pooling/config.json.
        normalize: with 2_Normalize.
        dense: width and activation of a Dense with random weights.
        inside: folder of the encoder, as older versions have it: 0_Transformer.
        modules: more classes, behind the others.
        pooling: changes 1_Pooling/config.json.
    """
    import torch

    (folder / inside).mkdir(parents=True, exist_ok=True)
    write_tiny_bert(folder / inside, new_bert().bert)
    settings = {"max_seq_length": 64, "do_lower_case": False}
    (folder / inside / "sentence_bert_config.json").write_text(json.dumps(settings))
    write_modules(
        folder, mode, normalize=normalize, dense=bool(dense), inside=inside, modules=modules, **pooling
    )
    if dense:
        write_dense(folder, dense["width"], dense["activation"], torch.Generator().manual_seed(1))
    if inside:  # the tokenizer lies beside the encoder
        for path in folder.glob("*token*"):
            path.unlink()
    return folder


def write_modules(folder, mode, *, normalize=True, dense=False, inside="", modules=(), **pooling):
    """What makes an encoder's folder one of sentence-transformers; arguments as `write_sentence_folder`."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    paths = [inside, *(f"{number}_{kind}" for number, kind in enumerate([*kinds[1:], *modules], start=1))]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"{KINDS}.{kind}"}
        for number, (kind, path) in enumerate(zip([*kinds, *modules], paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    flags = {name: name == mode for name in (MEAN, CLS, LAST, "pooling_mode_max_tokens")}
    settings = {"word_embedding_dimension": HIDDEN, **flags, "include_prompt": True, **pooling}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def write_dense(folder, width, activation, generator):
    """A Dense with random weights behind the pooling."""
    import torch
    from safetensors.torch import save_file

    (folder / "2_Dense").mkdir()
    about = {"in_features": HIDDEN, "out_features": width, "bias": True}
    about |= {"activation_function": f"torch.nn.modules.activation.{activation}"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(about))
    shapes = {"linear.weight": (width, HIDDEN), "linear.bias": (width,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "2_Dense" / "model.safetensors")


def plain_encoder(folder):
    """A copy without what sentence-transformers adds."""
    for name in ("modules.json", "1_Pooling", "2_Normalize", "2_Dense"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def hidden_states(folder, batch):
    """Last hidden state of the encoder by transformers itself, [B, L, H]."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        found = model(**{name: torch.from_numpy(array) for name, array in batch.items()})
    return np.asarray(found.last_hidden_state.numpy(), dtype=np.float64)


def expected(hidden, mask, mode, *, normalize=True):
    """Embeddings as sentence-transformers defines them, [B, H]."""
    rows = []
    for states, kept in zip(hidden, mask.astype(bool), strict=True):
        seen = states[kept]
        rows.append({MEAN: seen.mean(axis=0), CLS: states[0], LAST: seen[-1]}[mode])
    made = np.stack(rows)
    return made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12) if normalize else made
