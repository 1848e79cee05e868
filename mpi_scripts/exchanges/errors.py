"""What can go wrong in a comparison, beyond errors of RingPrune itself."""

__all__ = ["CannotRun"]


class CannotRun(Exception):
    """A method cannot run here; the message is one line that says why. The others go on."""
