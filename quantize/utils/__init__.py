"""Code that knows nothing of models: errors, files, records on disk, the machine."""
