"""A run as a model repository of NVIDIA Triton, with files to deploy it (`qdqbench export-triton`)."""
