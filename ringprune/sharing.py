"""A wrapper's param groups, state and defaults are the wrapped optimizer's own objects."""

import weakref

import torch

__all__ = ["follow", "share"]


def share(optimizer: torch.optim.Optimizer, wrapper: torch.optim.Optimizer) -> None:
    """Make param groups, state and defaults of the wrapper the wrapped optimizer's own objects."""
    wrapper.param_groups, wrapper.state = optimizer.param_groups, optimizer.state
    wrapper.defaults = optimizer.defaults


def follow(optimizer: torch.optim.Optimizer, wrapper: torch.optim.Optimizer) -> None:
    """:func:`share` now, and whenever the wrapped optimizer loads a state, with new param groups."""
    share(optimizer, wrapper)
    this = weakref.ref(wrapper)

    def again(optimizer: torch.optim.Optimizer) -> None:
        mine = this()
        if mine is not None:
            share(optimizer, mine)

    handle = optimizer.register_load_state_dict_post_hook(again)
    weakref.finalize(wrapper, handle.remove).atexit = False
