"""One bucket's way through an exchange as times of the processor, with a message behind each turn."""

from dataclasses import dataclass

import torch

from ringprune.plan import Bucket, Route
from ringprune.policies.policy import Policy
from ringprune.prediction.link import Network
from ringprune.prediction.messages import Message, kept, messages, proposed, roots, value_code_of
from ringprune.prediction.speeds import Speeds, each_at
from ringprune.routing import sent_whole

__all__ = ["Turn", "Work", "work_of"]


WITHOUT_VELOCITY = 12 / 20
"""Bytes that accumulating into a residual alone moves of an entry, over those with a velocity, which is measured."""


@dataclass(frozen=True)
class Turn:
    """What the processor does, and the message that it then starts.

    Attributes:
        seconds: of the processor.
        message: what is sent.
    """

    seconds: float
    message: Message


@dataclass(frozen=True)
class Work:
    """A bucket's part of an exchange.

    Attributes:
        bucket: the tensors.
        start: seconds of what needs no other rank: accumulate, select, copy.
        turns: as they follow one another, each when the message before it is there.
        finish: seconds of what follows the last message.
        asks: what the turns and ``finish`` do is coding, which lets messages go on.
    """

    bucket: Bucket
    start: float
    turns: tuple[Turn, ...]
    finish: float
    asks: bool = False

    @property
    def local_seconds(self) -> float:
        """All of the processor's time."""
        return self.start + sum(turn.seconds for turn in self.turns) + self.finish

    def seconds(self, link: Network, ranks: int) -> float:
        """The bucket alone, with nothing to hide behind."""
        return self.local_seconds + sum(turn.message.seconds(link, ranks) for turn in self.turns)


def work_of(
    bucket: Bucket, policy: Policy, ranks: int, speeds: Speeds, route: Route | None = None, *, groups: bool = False
) -> Work:
    """The work of one bucket.

    Every rank is taken to be a root: the step waits for the one that has most to do.

    Args:
        bucket: the tensors.
        policy: how they are exchanged, after warm-up.
        ranks: how many take part.
        speeds: of the processor.
        route: ``"dense"`` to send a packed bucket whole; None is the bucket's own.
        groups: the communicator sums groups of tensors where they are.
    """
    route = bucket.route if route is None else route
    sent = messages(bucket, policy, ranks, route)
    packed = route == "packed"
    selects = packed and not sent_whole(policy.density.target)
    positions = proposed(bucket, policy, ranks) if selects else 0
    count = kept(bucket, policy, ranks) if selects else bucket.numel
    density = count / bucket.numel if selects else 1.0
    each = each_at(speeds.kept, density)  # taken, or put
    codable = packed or bucket.dtype == torch.float32
    code = value_code_of(policy, "values" if packed else "dense", count, ranks) if codable else None
    in_place = code is not None and not selects and policy.reduction != "ring"
    start, finish = _alone(bucket, policy, speeds, packed, selects, positions, groups, in_place)
    before = [speeds.message * message.count for message in sent]
    if selects and policy.index_sets == "gathered":
        before[0] += each * count
        finish += speeds.merge * count * ranks
    else:
        first = len(sent) - (2 if code is not None and policy.reduction != "ring" else 1)
        if selects:
            share = 1 / policy.refresh
            before[0] += share * speeds.encode_index * positions
            number = roots(policy, ranks)
            read = speeds.decode_index + (each_at(speeds.unite, density) if number > 1 else 0.0)
            before[first] += share * read * positions * number + each * count
            finish += each * count
        if code is not None:
            there, back = speeds.encode_values[code.coding], speeds.decode_values[code.coding]
            others = (ranks - 1) / ranks
            before[first] += there * count * others
            before[-1] += back * count * others + there * count / ranks
            finish += back * count
    turns = tuple(Turn(seconds, message) for seconds, message in zip(before, sent, strict=True))
    return Work(bucket, start + speeds.tensor * len(bucket.members), turns, finish, asks=in_place)


def _alone(
    bucket: Bucket,
    policy: Policy,
    speeds: Speeds,
    packed: bool,
    selects: bool,
    positions: int,
    groups: bool,
    in_place: bool,
) -> tuple[float, float]:
    """Seconds of the passes over all entries, before the first message and after the last."""
    entries = bucket.numel
    if not packed and policy.dense_as_is and (groups or len(bucket.members) == 1):
        # Summed where the gradients are; a group is divided by the library.
        return speeds.whole * entries, 0.0 if groups else speeds.copy * entries
    if positions:
        share = 1 / policy.refresh
        select = each_at(speeds.select, positions / entries)
        start = (share * select + (1 - share) * speeds.accumulate) * entries
    elif selects:  # what is drawn by lot needs no scores
        start = speeds.accumulate * entries
    elif packed or (policy.dense_values != "fp32" and bucket.dtype == torch.float32):
        accumulate = speeds.accumulate * (1.0 if packed else WITHOUT_VELOCITY)
        start = (accumulate + (0.0 if in_place else speeds.copy)) * entries
    else:
        start = (speeds.copy + speeds.whole) * entries
    finish = (speeds.fill if selects else speeds.copy) * entries
    if policy.local_steps is not None:  # what the weights have moved by, and the step back to those of all
        start, finish = start + speeds.copy * entries, finish + speeds.copy * entries
    return start, finish
