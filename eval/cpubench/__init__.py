"""What a bench compares on a CPU: INT8 engines of its runtimes, their FP32 and BF16, PyTorch and NNCF."""
