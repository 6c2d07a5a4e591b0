"""The amax values: calibration, smoothing, splitting, bias correction, and their record."""
