"""Measure how many of FP32's 10 nearest texts an encoder with mean pooling keeps in BF16 and FP16, on a CPU.

    python -m tools.measure_neighbors stsb/validation.parquet MODEL ...

It is the yardstick for what INT8 keeps (`neighbors` of a run). Texts are the first 1,000 of the pairs.
"""

import sys

import numpy as np
import pyarrow.parquet
import torch
from transformers import AutoModel, AutoTokenizer

from qdqbench.quantize.tasks.types.embedding import cosines, overlap
from qdqbench.quantize.utils.arrays import Floats

TEXTS, BATCH = 1000, 64


def embed(folder: str, texts: list[str], dtype: torch.dtype) -> Floats:
    """Return the embeddings of texts, float32 [texts, width]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval().to(dtype)
    rows = np.zeros((len(texts), model.config.hidden_size), np.float32)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH):
            places = order[start : start + BATCH]
            batch = tokenizer([texts[place] for place in places], padding=True, return_tensors="pt")
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(dtype)
            rows[places] = ((hidden * mask).sum(1) / mask.sum(1)).float().numpy()
    return rows


def main(pairs: str, *folders: str) -> None:
    """Print a line for each model and type."""
    columns = pyarrow.parquet.read_table(pairs, columns=["sentence1", "sentence2"]).to_pydict()
    texts = [*dict.fromkeys([*columns["sentence1"], *columns["sentence2"]])][:TEXTS]
    for folder in folders:
        reference = embed(folder, texts, torch.float32)
        for dtype in (torch.bfloat16, torch.float16):
            rows = embed(folder, texts, dtype)
            kept, near = overlap(reference, rows).mean(), cosines(reference, rows).mean()
            print(f"{folder} {dtype}: neighbors {kept:.4f}, cosine {near:.6f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
