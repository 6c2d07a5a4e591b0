"""All steps to an INT8 model: recipe, calibration, Q/DQ, ONNX, engine, QAT, deployment."""
