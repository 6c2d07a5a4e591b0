"""Tasks: data, tokens, metrics, and kinds of tasks, which define labels, predictions and losses."""
