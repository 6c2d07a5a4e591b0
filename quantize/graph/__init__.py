"""The ONNX graph: read, export and rewrite it; an export gets its Q/DQ and precision here only."""
