"""A run's engine behind HTTP: batches by length, worker processes, limits, pages (`qdqbench serve`)."""
