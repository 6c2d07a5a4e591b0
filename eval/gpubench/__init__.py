"""What a bench compares on a GPU: engines, PyTorch and torch.compile, and which kernels the peers ran."""
