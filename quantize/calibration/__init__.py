"""Where amax values come from: calibration, smoothing, splitting, bias correction, and their record."""
