"""Encoder families: which module is what, loading, the attention that can be quantized."""
