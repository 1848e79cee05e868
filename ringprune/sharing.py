"""A wrapper's param groups, state, defaults and checkpoint hooks are the wrapped optimizer's own objects."""

import weakref

import torch

__all__ = ["follow", "share"]

HOOKS = tuple(f"_optimizer_{of}_{when}_hooks" for of in ("state_dict", "load_state_dict") for when in ("pre", "post"))
"""Where torch keeps the hooks of a checkpoint: what is made is the wrapped optimizer's, so they run there."""


def share(optimizer: torch.optim.Optimizer, wrapper: torch.optim.Optimizer) -> None:
    """Make param groups, state, defaults and checkpoint hooks of the wrapper the wrapped optimizer's own objects."""
    wrapper.param_groups, wrapper.state = optimizer.param_groups, optimizer.state
    wrapper.defaults = optimizer.defaults
    for hooks in HOOKS:
        setattr(wrapper, hooks, getattr(optimizer, hooks))


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
