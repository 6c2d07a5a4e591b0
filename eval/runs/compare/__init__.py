"""Finished runs side by side: accuracy paired on the same samples, speed, size, and where they differ."""
