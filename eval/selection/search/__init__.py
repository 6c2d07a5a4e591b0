"""Accuracy against latency: `qdqbench search`."""
