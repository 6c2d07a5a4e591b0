"""A task: data, tokens, loss, metrics."""
