"""Choosing a recipe: sensitivity, calibration methods, search, and `auto`."""
