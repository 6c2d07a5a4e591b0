"""A bench on a real GPU: every system runs, agrees with the others, and is faster where it must be."""

import pytest
from transformers import BertConfig

from qdqbench.eval.bench.quick import time_backends
from qdqbench.eval.bench.results import read_bench, row_of
from qdqbench.quantize.recipe.schema import load_recipe

from ..support.fake_bench import invoke

SHORT = ["--rounds", "6", "--duration", "0.1"]
GRID = ["--length", "32", "--batch", "1", "--batch", "8", *SHORT]


@pytest.fixture(scope="module")
def measured(sst2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "out"
    outcome = invoke("bench", "--model", sst2.model, "--out", folder, *GRID)
    assert outcome.exit_code == 0, outcome.exception
    return read_bench(folder / "bench.json")


def test_engines_and_peers_are_measured_in_their_best_form_and_agree(measured):
    for cell in measured.configs:
        for name in ("int8", "fp16", "fp32", "torch-fp32", "torch-fp16", "unpadded-fp16"):
            row = row_of(cell, name)
            assert row is not None, (name, [row.reason for row in cell.rows])
            assert "CUDA graph" in (row.detail or "")
            assert len(row.round_ms) == 6
            assert 0 < row.p50_ms <= row.p90_ms
            assert {rate.streams for rate in row.throughput} == {1, 2}
        assert row_of(cell, "compile-fp16") or any("torch.compile" in line for line in measured.warnings)
        peers = [row for row in cell.rows if row.kernels is not None]
        assert {"torch-fp16", "torch-fp16-eager", "unpadded-fp16"} <= {row.system for row in peers}
        assert all(row.kernels.fused_attention > 0 for row in peers)
        precision = {about.name: about.precision for about in measured.systems}
        halves = [row for row in cell.rows if row.status == "done" and precision[row.system] != "int8"]
        assert cell.headline.baseline == min(halves, key=lambda row: row.median_ms).system
        row = row_of(cell, "int8")
        assert row.int8_gemms == row.expected_int8_gemms > 0
        assert row.rel_error < 0.3
        assert all(row_of(cell, name).rel_error < 0.05 for name in ("fp16", "unpadded-fp16"))
    read = [row.clock_mhz for cell in measured.configs for row in cell.rows if row.clock_mhz is not None]
    assert read or any("were not read" in line for line in measured.warnings)


def test_repeated_measurements_agree(measured):
    """Rounds of one system are within a factor of three: anything else is no measurement."""
    for cell in measured.configs:
        for row in cell.rows:
            if row.status == "done":
                assert max(row.round_ms) < 3 * min(row.round_ms)


def test_a_data_set_is_packed_and_answers_what_padded_batches_answer(sst2, tmp_path):
    options = ["--dataset", "sst2", "--dataset-batch", "8", "--data", sst2.data, *SHORT]
    outcome = invoke("bench", "--model", sst2.model, "--out", tmp_path / "out", *options)
    assert outcome.exit_code == 0, outcome.exception
    (config,) = read_bench(tmp_path / "out" / "bench.json").configs
    row = row_of(config, "unpadded-fp16")
    assert row.rel_error < 0.05
    assert "the fastest size" in row.detail
    assert "CUDA graph" in row.detail


def test_auto_times_a_model_in_both_backends():
    takes, said = time_backends(load_recipe("bert-int8-attention"), BertConfig())
    assert said.startswith("auto takes cuda: 2 layers took" if takes else "auto takes TensorRT")
    assert "in cuda against TensorRT" in said
