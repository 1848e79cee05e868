"""Train the digits network with Accelerate, whose DistributedDataParallel averages nothing.

    torchrun --nproc-per-node 2 examples/train_digits_accelerate.py
    torchrun --nproc-per-node 2 examples/train_digits_accelerate.py --hook

RingPrune exchanges instead. With --hook DDP stays at work and hands RingPrune its gradients: one exchange a step.
"""

import argparse
import time
from typing import Any

import torch
from accelerate import Accelerator
from data.digits import digits
from models.digits_net import DigitsNet
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ringprune as rp


def main() -> None:
    """Train, validate, and report what was sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="backward passes that make a step")
    parser.add_argument("--hook", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate)
    train, held_out = digits()
    batches = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)
    model, batches = accelerator.prepare(DigitsNet(), batches)
    plain = accelerator.unwrap_model(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    exchange: Any
    if args.hook:
        exchange = rp.ddp_hook(rp.IWP(density=0.05, warmup=rp.Warmup(40)), named_parameters=plain.named_parameters())
        model.register_comm_hook(None, exchange)
    else:
        model.require_backward_grad_sync = False  # before the optimizer is wrapped
        exchange = optimizer = rp.DistributedOptimizer(optimizer, plain.named_parameters(), policy="iwp", comm="torch")
    # Not prepared, so that it is stepped once a step: prepared ones are stepped once for each rank.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, args.epochs * -(-len(batches) // args.accumulate), eta_min=1e-3
    )
    optimizer = accelerator.prepare(optimizer)  # leaves steps out while gradients are accumulated

    for _ in range(args.epochs):
        for images, labels in batches:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(images), labels))
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
    if not args.hook:
        exchange.flush()  # what was kept back; from here on the weights are the same on every rank

    plain.eval()
    with torch.no_grad():
        guessed = plain(held_out.images.to(accelerator.device)).argmax(1)
    right = (guessed == held_out.labels.to(accelerator.device)).float().mean().item()
    steps, ratio = (exchange.stats()[key] for key in ("steps", "wire_ratio"))
    accelerator.print(
        f"digits with Accelerate: {steps} steps, {right:.1%} right, {ratio:.1f} times fewer bytes than dense"
    )
    accelerator.wait_for_everyone()  # or a process of Gloo may wait for ever, or be aborted, at its end
    time.sleep(0.2)  # Gloo's thread lets go of the barrier; ended while it waits for Python, both wait for ever
    accelerator.end_training()


if __name__ == "__main__":
    main()
