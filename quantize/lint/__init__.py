"""Findings in any ONNX file."""
