"""Data of tasks: files and hub sets, checked splits, samples as tokens, and batches."""
