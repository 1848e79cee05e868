"""How errors name ranks, and which of them say the same."""

from collections.abc import Iterable, Sequence

__all__ = ["alike", "by_rank", "listed"]

SHOWN = 8
"""Ranks that are listed; of hundreds nobody reads all."""


def listed(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1, 2``, and of many the first."""
    first, more = sorted(ranks)[:SHOWN], len(ranks) - SHOWN
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, first))}" + (
        f" and {more} more" if more > 0 else ""
    )


def alike(said: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """The ranks that say each text, in the order in which texts are first said."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said:
        ranks.setdefault(text, []).append(rank)
    return ranks


def by_rank(texts: Sequence[str]) -> str:
    """What every rank says, in one line: those that say the same together, those that say nothing left out."""
    said = alike((rank, text) for rank, text in enumerate(texts) if text)
    return "; ".join(
        f"{f'all {len(texts)} ranks' if len(ranks) == len(texts) > 1 else listed(ranks)}: {text}"
        for text, ranks in said.items()
    )
