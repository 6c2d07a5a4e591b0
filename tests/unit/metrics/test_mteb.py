"""An encoder for MTEB; the library is a stand-in with the two names that are imported."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from qdqbench.eval.metrics import mteb as under_test
from qdqbench.quantize.deployment.write import describe_texts
from qdqbench.quantize.tasks.task import EMBED
from qdqbench.quantize.utils.errors import MissingDevice, UserError


@pytest.fixture
def served(monkeypatch):
    """A run whose embedding of a text is its number of tokens."""
    meta = SimpleNamespace(create_empty=lambda values: values["name"])
    for name, members in {
        "mteb": {},
        "mteb.models": {"ModelMeta": meta},
        "mteb.models.abs_encoder": {},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["mteb.models.abs_encoder"].AbsEncoder = object

    def run(batch):
        assert len(batch["input_ids"]) <= under_test.ROWS
        return batch["attention_mask"].sum(axis=1, keepdims=True).astype(np.float32)

    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    found = SimpleNamespace(tokenizer=tokenizer.to_str(), open_engine=lambda: run)
    # the run's own prompt would stand before documents too
    found.told = {**describe_texts(EMBED.kind, 1, 32), "prompt": "of the run ", "pad_id": 0, "side": "right"}
    found.told |= {"batch": 2, "inputs": ["input_ids", "attention_mask"], "labels": []}
    monkeypatch.setattr(under_test.Answering, "of", lambda folder, fp32: found)
    return found


def test_each_text_gets_its_own_embedding_in_the_order_of_the_texts(served):
    encoder = under_test.mteb_encoder("run")
    batches = [{"text": ["a b", "a b c d", "a"]}, {"text": ["a b c", "a b c d e"]}]
    assert encoder.encode(batches, task_metadata=None).tolist() == [[2], [4], [1], [3], [5]]
    assert encoder.mteb_model_meta == "qdqbench/run-engine"


def test_other_runs_and_a_missing_library_are_one_sentence(served, monkeypatch):
    served.told["kind"] = "classification"
    with pytest.raises(UserError, match="run is of classification; MTEB takes embedding models"):
        under_test.mteb_encoder("run")
    monkeypatch.setitem(sys.modules, "mteb.models", None)
    with pytest.raises(MissingDevice, match=r"this needs mteb.models; `pip install .*mteb"):
        under_test.mteb_encoder("run")
