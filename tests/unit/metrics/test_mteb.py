"""An encoder for MTEB; the library is a stand-in with the two names that are imported."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from qdqbench.eval.metrics import mteb as under_test
from qdqbench.quantize.tasks.data.encode import Sample
from qdqbench.quantize.tasks.task import EMBED, get_task
from qdqbench.quantize.utils.errors import MissingDevice, UserError


@pytest.fixture
def served(monkeypatch):
    """A run whose embedding of a text is its number of tokens; at most two rows a batch."""
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

    def encode(columns, prompt):
        assert prompt == ""  # the run's own would stand before documents too
        ids = [np.ones(len(text.split()), dtype=np.int64) for text in columns["text"]]
        return [Sample(row, each, 0 * each, False) for row, each in enumerate(ids)]

    def run(batch):
        assert len(batch["input_ids"]) <= 2
        return batch["attention_mask"].sum(axis=1, keepdims=True).astype(np.float32)

    found = SimpleNamespace(name="run", task=EMBED, pad_id=0, encode=encode)
    found.open_model, found.sizes = lambda model: run, lambda model, rows: [(8, 2)]
    monkeypatch.setattr(under_test, "open_served", lambda folder, fp32: found)
    return found


def test_each_text_gets_its_own_embedding_in_the_order_of_the_texts(served):
    encoder = under_test.mteb_encoder("run")
    batches = [{"text": ["a b", "a b c d", "a"]}, {"text": ["a b c", "a b c d e"]}]
    assert encoder.encode(batches, task_metadata=None).tolist() == [[2], [4], [1], [3], [5]]
    assert encoder.mteb_model_meta == "qdqbench/run-engine"


def test_other_runs_and_a_missing_library_are_one_sentence(served, monkeypatch):
    served.task = get_task("sst2")
    with pytest.raises(UserError, match="run is of classification; MTEB takes embedding models"):
        under_test.mteb_encoder("run")
    monkeypatch.setitem(sys.modules, "mteb.models", None)
    with pytest.raises(MissingDevice, match=r"this needs mteb.models; `pip install .*mteb"):
        under_test.mteb_encoder("run")
