"""A whole run or study: its stages one after the other, and their numbers gathered."""
