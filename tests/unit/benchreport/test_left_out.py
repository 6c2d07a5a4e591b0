"""Contestants that are left out of what is shown of a bench."""

from qdqbench.eval.benchreport.left_out import without_unmasked

from ..bench.test_results import sample_bench


def test_peers_that_had_no_mask_are_left_out() -> None:
    whole = sample_bench()
    assert without_unmasked(whole) == whole
    old = whole.model_copy(update={"settings": whole.settings.model_copy(update={"peers_masked": False})})
    found = without_unmasked(old)
    assert {about.name for about in old.contestants} > {about.name for about in found.contestants}
    assert {about.name for about in found.contestants} == {"int8", "fp16", "fp32"}
    assert {row.contestant for cell in found.cells for row in cell.rows} == {"int8", "fp16", "fp32"}
    assert {s.baseline for cell in found.cells for s in cell.speedups} == {"fp16", "fp32"}
    assert "without an attention mask" in found.warnings[-1]
    on_cpu = old.model_copy(update={"device": "cpu"})
    assert without_unmasked(on_cpu) == on_cpu
    real = [cell.model_copy(update={"kind": "real", "length": None}) for cell in old.cells]
    lengths = old.model_copy(update={"cells": real})
    assert without_unmasked(lengths).cells == real  # padded batches always had the mask
