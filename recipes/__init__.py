"""Recipes shipped with qdqbench: one YAML file each, by model family."""
