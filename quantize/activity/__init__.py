"""What a process is doing: told where the work is done, kept, and shown with a sign of life."""
