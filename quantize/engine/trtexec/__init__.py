"""TensorRT without its Python API: the command for trtexec, and readers of what trtexec wrote."""
