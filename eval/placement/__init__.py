"""Where INT8 can go, and the model of what it costs in latency."""
