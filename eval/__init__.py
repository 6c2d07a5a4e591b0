"""Tasks, data, metrics, comparison of the stages, and the reports."""
