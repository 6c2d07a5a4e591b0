"""The report of a run: its verdict, its sections and charts, and the pages of its training."""
