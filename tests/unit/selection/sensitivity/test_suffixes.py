"""Switching and evaluating from a layer on give what a plain fake-quant model gives."""

import numpy as np
import pytest

from qdqbench.eval.selection.sensitivity.measure import PartialForward, list_candidates, watch_norms
from qdqbench.eval.selection.trials.calibrations import QuantizerToggles
from qdqbench.eval.selection.trials.results import EMBEDDINGS, LAYERNORMS
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.tasks.kinds.encoded import Encoded

from ....support import tiny_bert

LAYERS = 3  # a first, a middle and a last one
SMOOTHED = Calibration(method="percentile/99.9", smoothing=0.5)
BATCHES = [
    (np.array([2, 0, 5]), tiny_bert.padded_batch((16, 14, 9))),
    (np.array([4, 1, 3]), tiny_bert.padded_batch((8, 8, 3), seed=1)),
]
NOTHING = [np.zeros(0, dtype=np.int64)] * 6  # tokens are those of the batches
ENCODED = Encoded(NOTHING, NOTHING, np.zeros(6, dtype=np.int64), 0)


class Prepared:
    """A calibrated model behind switches, and a twin of it with ModelOpt's quantizers alone."""

    def __init__(self, folder, calibration):
        recipe = tiny_bert.recipe_with("bert-int8-attention", calibration=calibration.model_dump(mode="json"))
        self.plain = load_model(str(folder))
        self.found = list_candidates(recipe, module_table(self.plain), "bert")
        self.plan = self.found.plan
        self.twin, self.model = load_model(str(folder)), load_model(str(folder))
        ptq.calibrate(self.twin, self.plan, tiny_bert.calibration_batches(), calibration)
        with watch_norms(self.model, calibration) as norms:
            ptq.calibrate(self.model, self.plan, tiny_bert.calibration_batches(), calibration)
            self.norms = norms()
        self.switches = QuantizerToggles(self.model, self.plan, self.norms)
        self.suffixes = PartialForward(self.model, BATCHES, ENCODED)
        self.quantizers = quantizers.list_quantizers(self.twin)

    def expected(self, on):
        """Logits of the twin with every token computed, and weights rounded in each forward pass."""
        for name, quantizer in self.quantizers.items():
            quantizer.enable() if name.rpartition(".")[0] in on else quantizer.disable()
        logits = np.empty((6, 3), np.float32)
        for rows, batch in BATCHES:
            logits[rows] = quantizers.forward(self.twin, batch).numpy()
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_bert, "LAYERS", LAYERS)
        return tiny_bert.write_tiny_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[Calibration(), SMOOTHED], ids=["max", "smoothed"])
def prepared(request, folder):
    return Prepared(folder, request.param)


def chosen():
    inside = ("attention.self.query", "attention.output.dense", "output.dense", "attention.self")
    return [f"bert.encoder.layer.{layer}.{name}" for layer in range(LAYERS) for name in inside]


@pytest.mark.parametrize("name", [*chosen(), "bert.pooler.dense", "classifier"])
def test_suffix_is_the_whole_model(prepared, name):
    """From the state before its layer, in both directions."""
    candidate = next(c for c in prepared.found.candidates if c.units == {name})
    assert candidate.start is not None
    start = LAYERS if candidate.start < 0 else candidate.start
    everything = prepared.found.everything
    for reference, on in ((frozenset(), candidate.units), (everything, everything - candidate.units)):
        prepared.switches.set(reference)
        states, _ = prepared.suffixes.start()
        for layer in range(start):
            states = prepared.suffixes.advance(states, layer)
        prepared.switches.set(on)
        found = prepared.suffixes.suffix(states, start)
        np.testing.assert_allclose(found, prepared.suffixes.full(), rtol=1e-5, atol=1e-5)
        # ModelOpt alone, all tokens: other matrix shapes round otherwise, and so may a code
        whole = prepared.expected(on)
        assert np.abs(found - whole).max() < 0.02 * whole.std()


def test_candidates_are_told_apart(prepared):
    """What the comparison above would see if a switch did not work."""
    found = {}
    for candidate in prepared.found.candidates:
        prepared.switches.set(candidate.units)
        found[candidate.key] = prepared.suffixes.full().tobytes()
    prepared.switches.set(())
    fp32 = prepared.suffixes.full()
    assert fp32.tobytes() not in found.values()
    assert len(set(found.values())) == len(found)
    np.testing.assert_allclose(fp32, prepared.expected(frozenset()), atol=1e-5)


def test_fp32_is_the_model_as_it_was(prepared):
    """Switching on and off leaves nothing behind; smoothing is exact."""
    prepared.switches.set({*prepared.found.everything, LAYERNORMS, EMBEDDINGS})
    prepared.switches.set(())
    found = prepared.suffixes.full()
    for rows, batch in BATCHES:
        np.testing.assert_allclose(found[rows], quantizers.forward(prepared.plain, batch).numpy(), atol=1e-5)


def test_every_layernorm_of_the_encoder_is_watched(prepared):
    inside = ("attention.output.LayerNorm", "output.LayerNorm")
    assert list(prepared.norms) == [
        f"bert.encoder.layer.{layer}.{name}" for layer in range(LAYERS) for name in inside
    ]
    assert all(float(amax) > 0 for amax in prepared.norms.values())
