"""A run directory: session, stage cache, graphs, profiles, outcomes of stages."""
