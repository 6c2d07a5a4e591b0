"""Which calibration is best: `qdqbench methods`."""
