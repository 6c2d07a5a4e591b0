"""Encoder families: the role of each module, model loading, and an attention that can be quantized."""
