"""What an error or a signal has left of an exchange, or of messages between two of them."""

from ringprune.errors import UsageError

__all__ = ["Damage"]

_AGAIN = "Start the program again from the last checkpoint, on all ranks"


class Damage:
    """What was broken off.

    Attributes:
        torn: of what is kept back some is that of after the exchange under way already, some not yet; or what exchanges
            next has taken over some of it.
        astray: messages between two exchanges were broken off, and other ranks may be in others: what is kept back is
            whole, and can be saved, but nothing more is exchanged, also not after a load.
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
        self.check_loadable()

    def check_loadable(self) -> None:
        """Before a checkpoint is loaded, which makes whole what is torn, and brings no rank's messages back in step.

        Raises:
            UsageError: this rank may be astray; on this rank.
        """
        if self.astray:
            saves = "" if self.torn else "; state_dict() still saves"
            raise UsageError(
                "an error or a signal broke off what the ranks measure and agree on between two steps: others may be "
                f"elsewhere, and nothing more is exchanged or loaded{saves}. {_AGAIN}"
            )
