"""Kinds of tasks as data: rows, labels, answers, scores, losses, and the head of the model."""
