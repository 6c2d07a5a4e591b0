"""Every command and group of the command line, with the words that call it."""

import typer.main

from qdqbench.cli.app import app


def list_commands(command=None, words=()):
    command = command or typer.main.get_command(app)
    found = {words: command}
    for name, inner in getattr(command, "commands", {}).items():
        found |= list_commands(inner, (*words, name))
    return found


COMMANDS = list_commands()


def find_command(words):
    """The words of a command line that call a command; of a group where its command is not known."""
    return next(tuple(words[:count]) for count in (2, 1, 0) if tuple(words[:count]) in COMMANDS)
