"""Engines of the CPU runtimes: ONNX file in, compiled model out, and what it runs in INT8."""
