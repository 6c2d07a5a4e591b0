"""What a user brings, by name: a tiny model of a kind or type, and data for it."""

import json

from ..support import families
from ..support.tables import write_table
from ..support.tiny_embedder import MEAN, write_modules
from . import heads, tiny

COLUMNS = {"csv": "moods", "json": "moods"}  # the task that own data is given as
PASSAGES, QUERIES = 5, {"train": 40, "validation": 24}


def task_of(name):
    return "sst2" if name in families.SIZES else COLUMNS.get(name, name)


def bring(name, folder):
    """Write `model` and `data`; returns where they are."""
    model, data = folder / "model", folder / "data"
    if name in ("tokens", "qa"):
        heads.write_model(model, name, steps=80)
        make = heads.tagged if name == "tokens" else heads.asked
        for seed, (split, rows) in enumerate({"train": 160, "validation": 64}.items()):
            write_table(data / f"{split}.jsonl", make(rows, seed))
    elif name == "embed":
        _write_texts(data := folder / "lines.txt")
        write_modules(families.write_model(model, "xlm-roberta", tiny.entries()), MEAN)
        about = {"prompts": {"query": "good ", "document": ""}, "default_prompt_name": None}
        (model / "config_sentence_transformers.json").write_text(json.dumps(about))
    elif name == "rerank":
        for seed, split in enumerate(QUERIES):
            tiny.write_split(data / f"{split}.parquet", passages(split, seed))
        families.write_model(model, "electra", tiny.entries(), labels=1)
    elif name in families.SIZES:
        tiny.write_data(data, "sst2")
        families.write_model(model, name, tiny.entries())
    elif name in COLUMNS:
        for split, count, seed in (("train", tiny.TRAIN_ROWS, 0), ("validation", tiny.EVAL_ROWS, 100)):
            table = tiny.rows("sst2", count, seed)
            own = {"words": table["sentence"], "mood": table["label"]}
            tiny.write_split(data / f"{split}.{name}", own)
        tiny.write_model(model, "sst2")
    else:
        tiny.write_data(data, name)
        tiny.write_model(model, name)
    return model, data


def _write_texts(path):
    """240 different texts, and 20 lines that are empty or there before."""
    texts = list(dict.fromkeys(tiny.sentences(300, 5)[0]))[:240]
    path.write_text("\n".join([*texts, *texts[:12], *[""] * 8]) + "\n")


def passages(split, seed):
    """Queries with passages each; the relevant one is the third."""
    count = QUERIES[split]
    queries = tiny.sentences(count, seed + 20)[0]
    assert len({*queries}) == count
    return {
        "query": [query for query in queries for _ in range(PASSAGES)],
        "passage": tiny.sentences(count * PASSAGES, seed + 10)[0],
        "label": [float(number % PASSAGES == 2) for number in range(count * PASSAGES)],
    }
