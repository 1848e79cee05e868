"""Train the digits network with Accelerate, whose DistributedDataParallel averages nothing.

    torchrun --nproc-per-node 2 examples/train_digits_accelerate.py
    torchrun --nproc-per-node 2 examples/train_digits_accelerate.py --hook

RingPrune exchanges instead. With --hook DDP stays at work and hands RingPrune its gradients: one exchange a step.
"""

import argparse

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
    parser.add_argument("--hook", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    train, held_out = digits()
    batches = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)
    model, batches = accelerator.prepare(DigitsNet(), batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    if args.hook:
        exchange = rp.ddp_hook(rp.IWP(density=0.05, warmup=rp.Warmup(40)), named_parameters=model.named_parameters())
        model.register_comm_hook(None, exchange)
    else:
        model.require_backward_grad_sync = False  # before the optimizer is wrapped
        exchange = optimizer = rp.DistributedOptimizer(
            optimizer, named_parameters=model.module.named_parameters(), policy="iwp", comm="torch"
        )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(batches), eta_min=1e-3)

    for _ in range(args.epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            schedule.step()
    if not args.hook:
        optimizer.flush()  # what was kept back; from here on the weights are the same on every rank

    plain = accelerator.unwrap_model(model).eval()
    with torch.no_grad():
        guessed = plain(held_out.images.to(accelerator.device)).argmax(1)
    right = (guessed == held_out.labels.to(accelerator.device)).float().mean().item()
    ratio = exchange.stats()["wire_ratio"]
    accelerator.print(f"digits with Accelerate: {right:.1%} right, {ratio:.1f} times fewer bytes than dense")
    accelerator.wait_for_everyone()  # or a process of Gloo may wait for ever, or be aborted, at its end
    accelerator.end_training()


if __name__ == "__main__":
    main()
