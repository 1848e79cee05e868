"""``ringprune profile``: how long each layer of a training script's model takes; the file that a replay reads."""

from ringprune.profiles.run import add_command

__all__ = ["add_command"]
