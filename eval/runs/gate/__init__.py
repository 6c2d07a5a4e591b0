"""The gate of a run: what fails, what was not judged, and what so few samples cannot tell."""
