"""Recipes that were tried, and the store of `methods`, `sensitivity`, `search` and `auto`."""
