"""Indices are looked at many at a time; whatever the op, the message names the first that is wrong."""

from collections.abc import Callable

import pytest
import torch

from ringprune.errors import ConfigurationError
from tests.ops.cases import Backend

MANY = 100_000
PLACES = [0, 1, 511, 512, 513, MANY // 3, MANY // 2, MANY - 1]
"""Where one index is wrong: at both sides of the blocks that are looked at together, and of the threads' parts."""


@pytest.mark.parametrize("threads_used", [1, 2, 3])
@pytest.mark.parametrize("op", ["gather", "take", "give_back"])
def test_one_wrong_index_among_many_is_named(
    host: Backend, threads: Callable[[int], None], op: str, threads_used: int
) -> None:
    threads(threads_used)
    residual = torch.ones(3 * MANY)
    more = {"gather": (), "take": ([0, 3 * MANY],), "give_back": (torch.zeros(MANY),)}[op]
    before = (None,) if op == "take" else ()
    for place in PLACES:
        for wrong in (-1, 3 * MANY, 0 if place else None):
            if wrong is None:
                continue
            indices = torch.arange(1, 3 * MANY, 3, dtype=torch.int32)
            indices[place] = wrong
            said = f"is not in \\[0, {3 * MANY}\\)" if wrong else f"is not above indices\\[{place - 1}\\]"
            with pytest.raises(ConfigurationError, match=rf"{op}: indices\[{place}\] = {wrong} {said}"):
                host.op(op)(residual, *before, indices, *more)
    assert bool((residual == 1.0).all())
