"""Run an engine."""
