"""The ladder that an expert climbs, until a recipe holds the gate: `qdqbench auto`."""
