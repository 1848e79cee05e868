"""The buckets of a step, in an order that rank 0 decides on the way: the most urgent of what is ready, within a credit.

Ranks finish their gradients at different times, and yet have to start the same messages in the same order. So rank 0
tells, one small broadcast per bucket, what goes next; the order is a log of operations that all ranks carry out alike.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from ringprune.comm.communicator import CPU, Communicator, Handle
from ringprune.exchange.exchange import Exchange
from ringprune.exchange.lane import UnderWay
from ringprune.metrics import Metrics
from ringprune.schedule import LayerPriority, Queue

__all__ = ["Dispatch"]

TURN = -1
"""The operation that gives every bucket under way another turn, and starts none."""


class Dispatch:
    """Sends the buckets of one step after the other. Nothing here waits, but where ``wait`` is given.

    Args:
        comm: with whom.
        exchange: whose buckets.
        metrics: counts the orders as headers.
        schedule: the credit.
        nbytes: of each bucket's values, as they count towards the credit.
    """

    def __init__(
        self,
        comm: Communicator,
        exchange: Exchange,
        metrics: Metrics,
        schedule: LayerPriority,
        nbytes: Sequence[int],
    ) -> None:
        self._comm, self._exchange, self._metrics = comm, exchange, metrics
        self._nbytes = nbytes
        self._queue = Queue(schedule.credit_bytes)
        self._priorities = list(range(len(nbytes)))
        self._order: Handle | None = None
        self._told: deque[Handle] = deque()  # rank 0's orders, until they have gone out
        self._here: set[int] = set()  # buckets that this rank has started on its own
        self._running: list[int] = []  # buckets with turns left, in the order in which they were started
        self._todo: deque[int] = deque()  # turns that the operation under way still gives
        self._chosen: int | None = None  # a bucket that is to go, and is not yet here
        self._left = self._orders = 0
        self._then: Callable[[], UnderWay] | None = None
        self._last: UnderWay | None = None
        self._sealed = True
        self.sent: set[int] = set()
        self._outstanding: set[int] = set()

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._comm.rank

    @property
    def idle(self) -> bool:
        """Whether nothing of a step is left to be started."""
        return self._then is None

    @property
    def quiet(self) -> bool:
        """Whether nothing of a step is left to be started or under way."""
        return self.idle and not self._outstanding and self._last is None

    @property
    def complete(self) -> bool:
        """Whether this rank has made its part of the step."""
        return self.idle or (self._sealed and len(self._here) == len(self._nbytes))

    def begin(self, priorities: Sequence[int], then: Callable[[], UnderWay]) -> None:
        """A step begins.

        Args:
            priorities: of each bucket; the lowest is the most urgent. Rank 0's count.
            then: called once when all messages have been started and the step is sealed, at the same place among them
                on every rank; starts the last message, and returns it.
        """
        assert self.idle, "a step begins before the messages of the one before were started"
        self._priorities, self._then = list(priorities), then
        self._left, self._orders, self._sealed = len(self._nbytes), 0, False
        self._collect(lambda index: True)  # those of the step before have been waited for
        self._here.clear()
        self.sent.clear()

    def ready(self, index: int) -> None:
        """This rank has made its own part of bucket ``index``."""
        self._here.add(index)
        if self._comm.rank == 0:
            self._queue.push(index, priority=self._priorities[index], nbytes=self._nbytes[index])

    def seal(self) -> None:
        """This rank knows all that the last message of the step tells."""
        self._sealed = True

    def reduced(self, index: int) -> bool:
        """Whether the bucket's averages are there."""
        return index in self.sent and self._exchange.reduced(index)

    def progress(self, *, wait: bool = False) -> bool:
        """Do one thing that is due.

        Args:
            wait: block for a message where nothing can be done without, and go beyond the credit rather than wait for
                what only other ranks can bring about.

        Returns:
            Whether something was done.
        """
        self._collect(self.reduced)
        if self.idle:
            if self._last is not None and self._last.done():
                self._last = None
            return False
        if self._todo:
            return self._turn(wait)
        if self._chosen is None and self._left:
            self._chosen = self._decide(wait)
            if self._chosen is None:
                return False
        if self._chosen is not None:
            return self._carry_out(self._chosen)
        return self._run_out()

    # -- the order ----------------------------------------------------------------------------------------------------

    def _decide(self, wait: bool) -> int | None:
        """The next operation, once it is known here."""
        if self._comm.rank == 0:
            return self._tell(wait)
        if self._order is None:
            self._order = self._broadcast(torch.zeros(1, dtype=torch.int32, device=CPU))
        if not wait and not self._order.done():
            return None
        order, self._order = int(self._order.wait()), None
        return order

    def _tell(self, wait: bool) -> int | None:
        operation = self._queue.pop(beyond=wait)
        if operation is None:
            if not self._running or not (wait or all(map(self._exchange.done, self._running))):
                return None
            operation = TURN
        while self._told and self._told[0].done():
            self._told.popleft().wait()
        self._told.append(self._broadcast(torch.tensor([operation], dtype=torch.int32, device=CPU)))
        return operation

    def _broadcast(self, message: torch.Tensor) -> Handle:
        self._orders += 1
        with self._metrics.sending("headers"):
            return self._comm.broadcast(message, 0, name=f"order {self._orders}")

    # -- operations ---------------------------------------------------------------------------------------------------

    def _carry_out(self, operation: int) -> bool:
        """Begin an operation, unless it is about a bucket that this rank has not made its part of."""
        if operation != TURN:
            if operation not in self._here:
                return False
            self._left -= 1
            self._todo.append(operation)
            self._outstanding.add(operation)
        self._todo.extend(self._running)
        self._running, self._chosen = [], None
        return True

    def _turn(self, wait: bool) -> bool:
        index = self._todo[0]
        if not wait and not self._exchange.done(index):
            return False
        self._todo.popleft()
        if self._exchange.advance(index):
            self._running.append(index)
        else:
            self.sent.add(index)
        return True

    def _run_out(self) -> bool:
        """All buckets have been started: the turns that are left follow from that."""
        if self._running:
            self._todo, self._running = deque(self._running), []
            return True
        if not self._sealed:
            return False
        then, self._then = self._then, None
        if then is not None:
            self._last = then()
        return True

    def _collect(self, over: Callable[[int], bool]) -> None:
        for index in [index for index in self._outstanding if over(index)]:
            self._outstanding.remove(index)
            if self._comm.rank == 0:
                self._queue.give_back(index)
