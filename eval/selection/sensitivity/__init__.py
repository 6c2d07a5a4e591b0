"""Which layer costs the accuracy: `qdqbench sensitivity`."""
