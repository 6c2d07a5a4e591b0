"""A run as a model repository of NVIDIA Triton, and what deploys it (`qdqbench export-triton`)."""
