"""The report document, its renderers, and how names and numbers are written."""
