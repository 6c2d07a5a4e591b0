"""Which calibration is best: `qdqbench compare-calibration`."""
