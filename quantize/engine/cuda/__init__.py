"""INT8 encoders in own CUDA kernels for Hopper: from an exported graph to a plan, its arrays and its answers."""
