"""Build an engine, and prove from its layer table what runs in INT8."""
