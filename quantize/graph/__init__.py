"""The ONNX graph: read, export, rewrite; here Q/DQ and all precision enter it."""
