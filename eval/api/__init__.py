"""What `qdqbench` offers to Python, and the command line calls; nothing here prints."""
