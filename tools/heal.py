"""Port an MPNet encoder to BERT's layout and heal it by distillation: a real BERT-base, with real outliers.

    python tools/heal.py all-mpnet-base-v2 bert-base-healed --texts glue

The relative position bias is dropped. All other weights are copied; positions move to the front, and token
types are zero. Then AdamW reduces the distance of the hidden states of every layer from those of the MPNet,
in bf16 where the GPU has it. Channels count alike, so that outlier channels do not outweigh the others.
Texts come from all splits of all tasks in a folder `TASK/SPLIT.parquet`; labels are not read. Each row is
taken as its task has it, and all texts are also joined to rows of full length. `heal.json` records the
errors on held-out rows before and after; their texts may be part of joined rows.
"""

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, BertConfig, BertModel, MPNetModel, PreTrainedTokenizerFast

from qdqbench.quantize.models.load import use_attention
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.system.environment import describe_environment

NAMES = {  # parts of parameters' names, as BERT has them
    "attention.attn.q.": "attention.self.query.",
    "attention.attn.k.": "attention.self.key.",
    "attention.attn.v.": "attention.self.value.",
    "attention.attn.o.": "attention.output.dense.",
    "attention.LayerNorm.": "attention.output.LayerNorm.",
}
FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
FIELDS += ("hidden_act", "layer_norm_eps", "pad_token_id")
HELD_OUT, POOL, LOG_STEPS = 512, 8192, 50
Rows = list[list[int]]


def port(teacher: MPNetModel) -> BertModel:
    """Copy the weights of an MPNet, but for the relative position bias, into a BERT."""
    config, pad = teacher.config, int(teacher.config.pad_token_id)
    positions = config.max_position_embeddings - pad - 1
    shape = {name: getattr(config, name) for name in FIELDS}
    student = BertModel(BertConfig(**shape, max_position_embeddings=positions))
    state = student.state_dict()
    for theirs, value in teacher.state_dict().items():
        name = functools.reduce(lambda name, part: name.replace(*part), NAMES.items(), theirs)
        if "relative_attention_bias" not in name:
            state[name] = value[pad + 1 :] if "position_embeddings" in name else value
    state["embeddings.token_type_embeddings.weight"].zero_()
    student.load_state_dict(state)
    return student


def read_rows(folder: Path, tokenizer: Tokenizer, length: int, seed: int) -> Rows:
    """Return the tokens of all rows of all tasks, and of all their texts joined to rows of `length`."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    rows: Rows = []
    texts: dict[str, None] = {}
    for path in sorted(folder.glob("*/*.parquet")):
        table = pyarrow.parquet.read_table(path)
        columns = [table[name].to_pylist() for name in table.column_names if name not in ("label", "idx")]
        samples = list(zip(*columns, strict=True)) if len(columns) > 1 else columns[0]
        rows += [each.ids for each in tokenizer.encode_batch(samples)]
        texts |= dict.fromkeys(text for column in columns for text in column)
    known = list(texts)
    order = np.random.default_rng(seed).permutation(len(known))
    alone = tokenizer.encode_batch([known[index] for index in order], add_special_tokens=False)
    first, last = rows[0][0], rows[0][-1]
    stream = np.array([token for each in alone for token in each.ids])
    inner = length - 2
    joined = stream[: len(stream) // inner * inner].reshape(-1, inner)
    return rows + [[first, *row, last] for row in joined.tolist()]


def draw_batches(rows: Rows, tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield, epoch after epoch, indexes of rows of similar length, of at most `tokens` with padding."""
    lengths = np.array([len(row) for row in rows])
    for epoch in range(sys.maxsize):
        generator = np.random.default_rng([seed, epoch])
        order = generator.permutation(len(rows))
        batches: list[list[int]] = []
        for start in range(0, len(order), POOL):
            pool = order[start : start + POOL]
            batch: list[int] = []
            for index in pool[np.argsort(lengths[pool], kind="stable")].tolist():
                if batch and (len(batch) + 1) * _padded(lengths[index]) > tokens:
                    batches.append(batch)
                    batch = []
                batch.append(index)
            batches.append(batch)
        for number in generator.permutation(len(batches)):
            yield batches[number]


def _padded(length: int) -> int:
    return -(-length // 8) * 8


def pad_rows(rows: Rows, pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and attention mask, int64 [B, L]."""
    tokens = np.full((len(rows), _padded(max(map(len, rows)))), pad)
    mask = np.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row)], mask[number, : len(row)] = row, 1
    return torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device)


def run_states(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the states after each layer, zero where there is padding, float32 [layers, B, L, H]."""
    states = model(input_ids=tokens, attention_mask=mask, output_hidden_states=True).hidden_states[1:]
    return torch.stack(states).float() * mask[..., None]


class Distance:
    """Mean squared error of all layers, each channel in units of its standard deviation in the teacher."""

    def __init__(self, states: torch.Tensor, mask: torch.Tensor) -> None:
        self.scale = states[:, mask.bool()].std(dim=1)[:, None, None].clamp_min(1e-3)

    def __call__(self, student: torch.Tensor, teacher: torch.Tensor, tokens: int) -> torch.Tensor:
        layers, *_, width = student.shape
        return (((student - teacher) / self.scale) ** 2).sum() / (layers * tokens * width)


def judge(student: Any, teacher: Any, held_out: Rows) -> dict[str, float]:
    """Compare the last states on held-out rows, in FP32: relative error, mean cosine of pooled rows."""
    error, power, pad = 0.0, 0.0, int(student.config.pad_token_id)
    cosines: list[float] = []
    with torch.inference_mode():
        for start in range(0, len(held_out), 64):
            tokens, mask = pad_rows(held_out[start : start + 64], pad, student.device)
            mine, theirs = (
                model(input_ids=tokens, attention_mask=mask).last_hidden_state for model in (student, teacher)
            )
            counted = mask[..., None]
            error += float((((mine - theirs) * counted) ** 2).sum())
            power += float(((theirs * counted) ** 2).sum())
            pooled = [(states * counted).sum(1) for states in (mine, theirs)]
            cosines += cosine_similarity(*pooled).tolist()
    return {"relative_error": math.sqrt(error / power), "mean_cosine": sum(cosines) / len(cosines)}


def distill(student: Any, teacher: Any, rows: Rows, given: argparse.Namespace) -> list[dict[str, float]]:
    """Train the student in place for the given steps or seconds; return the log."""
    device, pad = student.device, int(student.config.pad_token_id)
    optimizer = torch.optim.AdamW(student.parameters(), lr=given.learning_rate, weight_decay=0.0, fused=True)
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    distance, losses, seen = None, [], 0
    log: list[dict[str, float]] = []
    begun = time.monotonic()
    for step, batch in enumerate(draw_batches(rows, given.tokens, given.seed), 1):
        done = max((step - 1) / given.steps, (time.monotonic() - begun) / (given.seconds or math.inf))
        if done >= 1:
            break
        rate = min(step / given.warmup, 0.5 * (1 + math.cos(math.pi * done))) * given.learning_rate
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens, mask = pad_rows([rows[index] for index in batch], pad, device)
        count = sum(len(rows[index]) for index in batch)
        with bf16:
            with torch.no_grad():
                wanted = run_states(teacher, tokens, mask)
            distance = distance or Distance(wanted, mask)
            loss = distance(run_states(student, tokens, mask), wanted, count)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        seen += count
        if step % LOG_STEPS == 0:
            mean, losses = float(torch.stack(losses).mean()), []
            log.append({"step": step, "loss": mean, "tokens": seen, "seconds": time.monotonic() - begun})
            print(json.dumps(log[-1]), flush=True)
    return log


def heal(given: argparse.Namespace) -> None:
    """Port, distill, and save the model with its record."""
    torch.manual_seed(given.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = AutoModel.from_pretrained(given.model, dtype=torch.float32)
    student: Any = port(teacher).to(device).eval()
    use_attention(teacher.to(device).eval().requires_grad_(False), "sdpa")
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    held_out, rows = _hold_out(read_rows(given.texts, tokenizer, given.length, given.seed), given.seed)
    record: dict[str, Any] = {name: getattr(given, name) for name in OPTIONS}
    record |= {"rows": len(rows), "tokens_of_rows": sum(map(len, rows)), "held_out": len(held_out)}
    record["before"] = judge(student, teacher, held_out)
    print(json.dumps(record), flush=True)
    record["log"] = distill(student, teacher, rows, given)
    record["after"] = judge(student, teacher, held_out)
    print(json.dumps(record["after"]), flush=True)
    save(student, given.model, given.out)
    files.write_json(given.out / "heal.json", record | {"environment": describe_environment()})


def _hold_out(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """Divide rows into held-out ones, which none of the others equals, and the others."""
    order = np.random.default_rng([seed, 1]).permutation(len(rows)).tolist()
    held = {tuple(rows[index]) for index in order[: min(HELD_OUT, len(rows) // 10)]}
    return [list(row) for row in sorted(held)], [rows[i] for i in order if tuple(rows[i]) not in held]


def save(student: BertModel, source: Path, out: Path) -> None:
    """Write the model and its tokenizer, which keeps the vocabulary of the MPNet."""
    student.save_pretrained(out)
    config = json.loads((source / "tokenizer_config.json").read_text())
    tokens = {
        key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"),
        model_max_length=student.config.max_position_embeddings,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **tokens,
    )
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.save_pretrained(out)


OPTIONS = ("steps", "seconds", "tokens", "length", "learning_rate", "warmup", "seed")


def main(arguments: list[str] | None = None) -> int:
    """Heal as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of an MPNet")
    parser.add_argument("out", type=Path, help="folder that is written")
    parser.add_argument("--texts", type=Path, required=True, help="folder of TASK/SPLIT.parquet")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, help="end earlier: the learning rate falls with time then")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step, with padding")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row, at most")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    heal(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
