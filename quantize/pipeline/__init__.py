"""A run directory: session, stage cache, artifacts."""
