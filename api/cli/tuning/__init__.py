"""Commands that choose what becomes INT8, and how."""
