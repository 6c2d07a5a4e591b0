"""A task: data, tokens, metrics, and its kind, which says what labels, answers and losses are."""
