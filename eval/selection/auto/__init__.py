"""Steps from the cheapest to the dearest, until a recipe holds the gate: `qdqbench auto`."""
