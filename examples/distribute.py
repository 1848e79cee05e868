"""Plain Horovod or RingPrune: the one place where the training scripts differ from an ordinary Horovod script."""

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import ranks
import torch

__all__ = ["POLICIES", "clip_and_step", "distribute", "shared_weights"]

POLICIES = ("horovod-fp32", "horovod-fp16", "dense", "iwp", "recommended", "auto")
CLIPS = ("iwp", "auto")


def distribute(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, args: argparse.Namespace
) -> torch.optim.Optimizer:
    """Wrap ``optimizer`` so that its ``step()`` averages the gradients over the ranks, the way ``--policy`` says."""
    named = model.named_parameters()
    if args.policy.startswith("horovod"):
        if ranks.started_by_torchrun():
            raise SystemExit(f"--policy {args.policy} needs Horovod's ranks: start it with horovodrun or mpirun")
        import horovod.torch as hvd

        if args.policy == "horovod-fp32":
            return hvd.DistributedOptimizer(optimizer, named_parameters=named)
        return hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=hvd.Compression.fp16)

    import ringprune as rp

    policy = rp.Dense()
    if args.policy == "iwp":
        warmup = rp.Warmup(steps=args.density_warmup, start=1.0)
        policy = rp.IWP(
            density=args.density, roots=args.roots, warmup=warmup, clip_norm=args.clip, local_steps=args.local_steps
        )
    elif args.policy == "recommended":
        policy = rp.recommended(optimizer)
    elif args.policy == "auto":
        packed = rp.IWP(density=args.density, roots=args.roots, clip_norm_per_tensor=args.clip)
        policy = rp.Auto((replace(rp.Dense(), clipping=packed.clipping), packed))
    return rp.DistributedOptimizer(
        optimizer, named_parameters=named, policy=policy, comm=rp.connect(args.comm), model=model, seed=args.seed
    )


def shared_weights(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Inside, every rank has the same weights; with ``--local-steps`` they differ between exchanges."""
    return optimizer.shared_weights() if hasattr(optimizer, "shared_weights") else nullcontext()


def clip_and_step(optimizer: torch.optim.Optimizer, model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Step with the norm of the gradient bounded by ``--clip``, where it was given.

    Averaged gradients are clipped between ``synchronize()`` and ``step()``. A policy that keeps part of the gradient
    back has to clip before it does so, on each rank: IWP was told the bound at construction.
    """
    if args.clip is None or args.policy in CLIPS:
        optimizer.step()
        return
    if args.policy == "recommended":  # each rank steps on its own gradients, and exchanges what its weights moved by
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        return
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    with optimizer.skip_synchronize():
        optimizer.step()
