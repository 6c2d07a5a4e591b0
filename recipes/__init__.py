"""Recipes shipped with qdqbench: one YAML file each, for all model families."""
