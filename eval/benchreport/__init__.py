"""What a bench says: its figures as words, tables and charts, on the terminal and on pages."""
