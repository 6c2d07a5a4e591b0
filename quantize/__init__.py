"""What makes an INT8 model: recipe, calibration, Q/DQ, ONNX, engine, QAT; and the command line."""
