"""Texts over HTTP: fronts that tokenize, an engine process for each device, and shared memory between."""
