"""Random tensors for the kernels: sizes at the borders of their tiles, and numbers that are hard on them."""

import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["BORDERS", "FLOATS", "STREAMED", "Values"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BORDERS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 511, 512, 513, 575, 1023, 1024, 1025, 4097)
STREAMED = 2**22  # from here on results are written past the cache, by instructions of their own
CANARY = 0xA5
SPECIALS = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 3.4e38, -3.4e38, 1.0, -1.0)

STYLES: tuple[Callable[["Values", int], Tensor], ...] = (
    lambda v, n: v.normal(n),
    lambda v, n: v.normal(n),
    lambda v, n: v.normal(n).round(),
    lambda v, n: torch.zeros(n),
    lambda v, n: torch.full((n,), v.choice.choice((*SPECIALS, 0.5))),
    lambda v, n: v.normal(n) * 1e-42,
    lambda v, n: v.normal(n) * 1e38,
    lambda v, n: (v.normal(n) * 20).exp(),
    lambda v, n: torch.where(v.normal(n) > 2.5, v.normal(n), 0.0),
    lambda v, n: torch.linspace(-1, 1, n) if n else torch.zeros(0),
    lambda v, n: torch.tensor(SPECIALS)[torch.randint(len(SPECIALS), (n,), generator=v.generator)],
    lambda v, n: torch.where(v.normal(n) > 2, torch.tensor(v.choice.choice(SPECIALS)), v.normal(n)),
    lambda v, n: torch.randint(-(2**31), 2**31, (n,), generator=v.generator).int().view(torch.float32),
)


class Values:
    """Random values from one seed.

    A tensor is either an allocation of its own, beyond whose ends AddressSanitizer sees every access of compiled code,
    or lies in a larger one at any alignment, between bytes that :meth:`check_canaries` knows: they tell of writes by
    instructions that the sanitizer does not follow.

    Attributes:
        choice: for what is not a tensor.
        generator: for what is.
    """

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self._guarded: list[tuple[Tensor, int, int]] = []

    def normal(self, numel: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(numel, generator=self.generator)

    def numel(self, large: float) -> int:
        """How many entries; with probability ``large`` so many that threads share them."""
        if self.choice.random() < large:
            return self.choice.randint(100_000, 300_000)
        if self.choice.random() < 0.6:
            return self.choice.choice(BORDERS)
        return self.choice.randint(0, 9_000)

    def tensor(self, numel: int, dtype: torch.dtype = torch.float32, *, shaped: bool = False) -> Tensor:
        """Numbers of one random style."""
        return self.place(self.choice.choice(STYLES)(self, numel).to(dtype), shaped=shaped)

    def place(self, numbers: Tensor, *, shaped: bool = False) -> Tensor:
        """A copy in memory where overruns are seen, perhaps of several dimensions."""
        size = numbers.numel() * numbers.element_size()
        if self.choice.random() < 0.5:
            placed = numbers.clone()
        else:
            before, after = (numbers.element_size() * self.choice.randint(0, 40) for _ in range(2))
            room = torch.full((before + size + after,), CANARY, dtype=torch.uint8)
            placed = room[before : before + size].view(numbers.dtype)
            placed.copy_(numbers)
            self._guarded.append((room, before, before + size))
        if shaped and numbers.numel() == 1 and self.choice.random() < 0.5:
            return placed.view(())
        if shaped and numbers.numel() % 2 == 0 and self.choice.random() < 0.3:
            return placed.view(2, numbers.numel() // 2)
        return placed

    def bits(self, numel: int) -> Tensor:
        """Any int32: what hints may be found to hold."""
        wild = torch.randint(-(2**31), 2**31, (numel,), generator=self.generator)
        known = torch.tensor([0, 1, 2, 16, 1178, 2560, -1, -5, 2**31 - 1, -(2**31), 0x7F800001, 0x3F800000])
        tame = known[torch.randint(len(known), (numel,), generator=self.generator)]
        near = (torch.rand(numel, generator=self.generator) * 4).view(torch.int32).long()
        which = torch.randint(3, (numel,), generator=self.generator)
        return self.place(torch.where(which == 0, wild, torch.where(which == 1, tame, near)).int())

    def ascending(self, numel: int) -> Tensor:
        """Strictly ascending positions below ``numel``, from none to all of them."""
        density = self.choice.choice((0.0, 0.001, 0.01, 0.3, 0.95, 1.0))
        return self.place((torch.rand(numel, generator=self.generator) < density).nonzero().reshape(-1).int())

    def offsets(self, numel: int) -> list[int]:
        """Where up to six tensors start that share ``numel`` entries; some are empty."""
        return [0, *sorted(self.choice.randint(0, numel) for _ in range(self.choice.randint(0, 5))), numel]

    def counts(self, numels: Iterable[int]) -> list[int]:
        """How many to select of each tensor."""
        shares = (0.0, 0.001, 0.01, 0.05, 0.3, 0.6, 1.0)
        return [min(n, round(self.choice.choice(shares) * n) + self.choice.randint(0, 2)) for n in numels]

    def check_canaries(self) -> None:
        """Fail where something was written beside a tensor."""
        for room, start, end in self._guarded:
            assert bool((room[:start] == CANARY).all()), "written before the start of a tensor"
            assert bool((room[end:] == CANARY).all()), "written beyond the end of a tensor"
