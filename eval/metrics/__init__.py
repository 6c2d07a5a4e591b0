"""A model against FP32: logits, comparison, parity."""
