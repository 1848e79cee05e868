"""``ringprune report``: what runs have sent, from the files that they wrote."""

from ringprune.report.command import add_command

__all__ = ["add_command"]
