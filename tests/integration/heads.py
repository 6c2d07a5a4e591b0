"""Tiny models with heads over tokens, and generated data that they learn within seconds."""

import numpy as np

from .tiny import FILLERS, POSITIONS, WORDS, fresh, tokenizer

TAGS = ("O", "B-GOOD", "I-GOOD", "B-BAD", "I-BAD")
QUESTIONS = {"what is good": 1, "what is awful": -1}


def tagged(rows, seed):
    """Sentences of single words; runs of good words, and of bad ones, are entities (IOB2)."""
    random = np.random.default_rng(seed)
    words = [str(word) for word in (*FILLERS, *FILLERS, *WORDS)]
    sentences = [[str(word) for word in random.choice(words, random.integers(3, 20))] for _ in range(rows)]
    return {"tokens": sentences, "ner_tags": [tags_of(sentence) for sentence in sentences]}


def tags_of(sentence):
    """The tag of each word."""
    found, before = [], 0
    for word in sentence:
        value = WORDS.get(word, 0)
        name = {0: "O", 1: "GOOD", -1: "BAD"}[value]
        found.append(name if not value else f"{'I' if value == before else 'B'}-{name}")
        before = value
    return found


def asked(rows, seed, longest=40):
    """Contexts of fillers with one good and one bad word; the question says which is the answer."""
    random = np.random.default_rng(seed)
    table = {"id": [], "question": [], "context": [], "answers": []}
    for row in range(rows):
        words = [str(word) for word in random.choice(FILLERS, random.integers(6, longest))]
        places = random.choice(len(words), 2, replace=False)
        for place, value in zip(places, (1, -1), strict=True):
            words[place] = str(random.choice([word for word, known in WORDS.items() if known == value]))
        question, value = list(QUESTIONS.items())[row % 2]
        place = places[0 if value == 1 else 1]
        start = len(" ".join(words[:place])) + int(place > 0)
        table["id"].append(str(row))
        table["question"].append(question)
        table["context"].append(" ".join(words))
        table["answers"].append({"text": [words[place]], "answer_start": [start]})
    return table


def new_model(kind, model_type="bert"):
    """A model of random weights in which a word's value has a direction of its own, as in `tiny`."""
    from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

    fields = {"max_position_embeddings": POSITIONS + 2, "pad_token_id": 0, "type_vocab_size": 2}
    if kind == "tokens":
        return fresh(AutoModelForTokenClassification, model_type, id2label=dict(enumerate(TAGS)), **fields)
    return fresh(AutoModelForQuestionAnswering, model_type, **fields)


def write_model(folder, kind, steps=120):
    """Train on generated data for a few seconds, with the kind's own rows and loss."""
    import datasets
    import torch

    from qdqbench.quantize.tasks.data.encode import encode
    from qdqbench.quantize.tasks.data.splits import Split
    from qdqbench.quantize.tasks.task import get_task, with_classes
    from qdqbench.quantize.utils.system.quiet import quiet

    task = get_task(kind)
    task = with_classes(task, TAGS) if kind == "tokens" else task
    table = tagged(600, 7) if kind == "tokens" else asked(600, 7, longest=12)
    columns = (*task.text_columns, task.label_column)
    dataset = datasets.Dataset.from_dict({name: table[name] for name in columns})
    encoded = encode(Split(dataset, "", "", 600, ()), task, tokenizer(), POSITIONS)
    model, labels = new_model(kind), torch.from_numpy(encoded.labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = np.random.default_rng(0)
    from qdqbench.quantize.tasks.kinds.kind import join_outputs

    for _ in range(steps):
        rows = random.integers(encoded.rows, size=32)
        batch = {name: torch.from_numpy(array) for name, array in encoded.batch(rows.tolist(), 0)[1].items()}
        places, counts = (torch.from_numpy(each) for each in encoded.places(rows))
        made = encoded.kept(rows, join_outputs(model(**batch), task.kind.outputs))
        (task.kind.loss(made, labels[places], counts) / 32).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with quiet("transformers"):
        model.eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
