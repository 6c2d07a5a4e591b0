"""Latency against FP16, FP32 and PyTorch: `qdqbench bench`."""
