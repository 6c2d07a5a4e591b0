"""Mends ONNX files of any origin: reads their scales, takes Q/DQ off and puts them at INT8 GEMMs."""
