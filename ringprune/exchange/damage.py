"""What an error or a signal has left of an exchange, or of messages between two of them."""

from ringprune.errors import UsageError

__all__ = ["Damage"]

_AGAIN = "Start again from the last checkpoint, on all ranks"


class Damage:
    """What was broken off.

    Attributes:
        torn: of what is kept back some is that of after the exchange under way already, some not yet; or what exchanges
            next has taken over some of it.
        astray: messages between two exchanges were broken off, and other ranks may be in others: what is kept back is
            whole, and can be saved, but nothing more is exchanged.
    """

    def __init__(self) -> None:
        self.torn = self.astray = False

    def check_whole(self) -> None:
        """Before something is saved or exchanged: after an exchange that was broken off there may be nothing whole.

        Raises:
            UsageError: so it is; on this rank.
        """
        if self.torn:
            raise UsageError(
                "an exchange was broken off in the middle, by an error or a signal: what this rank keeps back is that "
                f"of neither before nor after it, and nothing can be saved or exchanged. {_AGAIN}"
            )

    def check_together(self) -> None:
        """Before an exchange, also whether this rank is where the others are.

        Raises:
            UsageError: it may not be; on this rank.
        """
        self.check_whole()
        if self.astray:
            raise UsageError(
                "an error or a signal broke off what the ranks measure and agree on between two steps: others may be "
                f"elsewhere, and nothing more is exchanged; state_dict() still saves. {_AGAIN}"
            )
