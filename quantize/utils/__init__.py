"""What knows nothing of models: errors, files, rows that are written to disk, the machine."""
