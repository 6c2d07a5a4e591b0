"""What quantization did: which answers and classes it changed, and what the recipe changed besides Q/DQ."""
