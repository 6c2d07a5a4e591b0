"""The command line; nothing imports it."""
