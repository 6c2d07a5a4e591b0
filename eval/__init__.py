"""What judges a model that `quantize` made: accuracy, engines, latency, searches, reports."""
