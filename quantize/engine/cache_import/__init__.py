"""What is brought over from TensorRT 10: the scales of a calibration cache as a recipe."""
