"""INT8 encoders in CUDA kernels for Hopper: plan, matcher, packer and interpreter of an exported graph."""
