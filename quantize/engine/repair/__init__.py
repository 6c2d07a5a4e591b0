"""Repair of ONNX files of any origin: read their scales, remove Q/DQ, and insert it at INT8 GEMMs."""
