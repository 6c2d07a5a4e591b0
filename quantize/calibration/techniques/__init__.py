"""Techniques of calibration: what each does, what it records of it, and what a report says of that."""
