"""A wrapper's param groups, state, defaults and checkpoint hooks are the wrapped optimizer's own objects."""

import weakref
from collections import OrderedDict
from typing import Any

import torch

__all__ = ["Sharer", "follow", "share"]

OWN = ("param_groups", "state", "defaults")
"""Attributes that a program may give an optimizer anew, such as an empty state to begin with other moments."""

HOOKS = tuple(f"_optimizer_{of}_{when}_hooks" for of in ("state_dict", "load_state_dict") for when in ("pre", "post"))
"""Where torch keeps the hooks of a checkpoint: what is made is the wrapped optimizer's, so they run there."""


class Sharer(torch.optim.Optimizer):
    """A wrapper: what it is given in place of param groups, state or defaults is the wrapped optimizer's as well."""

    _wrapped: torch.optim.Optimizer | None = None  # once they share

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # What is the wrapped one's already may be a property there, which takes no value.
        if name in OWN and self._wrapped is not None and getattr(self._wrapped, name) is not value:
            setattr(self._wrapped, name, value)


def share(optimizer: torch.optim.Optimizer, wrapper: torch.optim.Optimizer) -> None:
    """Make param groups, state, defaults and checkpoint hooks of the wrapper the wrapped optimizer's own objects."""
    for name in (*OWN, *HOOKS):
        setattr(wrapper, name, getattr(optimizer, name))


def follow(optimizer: torch.optim.Optimizer, wrapper: Sharer) -> None:
    """:func:`share` now, and whenever the wrapped optimizer loads a state, with new param groups."""
    for name in HOOKS:  # some around another optimizer do not call torch's constructor, which makes them
        vars(optimizer).setdefault(name, OrderedDict())
    share(optimizer, wrapper)
    wrapper._wrapped = optimizer
    this = weakref.ref(wrapper)

    def again(optimizer: torch.optim.Optimizer) -> None:
        mine = this()
        if mine is not None:
            share(optimizer, mine)

    handle = optimizer.register_load_state_dict_post_hook(again)
    weakref.finalize(wrapper, handle.remove).atexit = False
