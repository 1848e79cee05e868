"""``ringprune advise``: whether compression would pay, predicted without running anything."""

from ringprune.advise.command import add_command

__all__ = ["add_command"]
