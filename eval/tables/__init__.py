"""The maintainers' tables of measured results."""
