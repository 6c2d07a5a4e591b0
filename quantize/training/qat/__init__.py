"""Quantization-aware training of a run."""
