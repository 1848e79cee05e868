"""A whole training script in one file, to copy from: AdamW with clipping, accumulation, a schedule and checkpoints.

It needs nothing else of this folder. A line with ``# ranks`` is there because there are several ranks, as with plain
Horovod, one with ``# ringprune`` because of RingPrune; a script for one process has neither.

    horovodrun -np 2 python examples/train_one_file.py run            # the same line again continues where it stopped
"""

import argparse
import os
from pathlib import Path

import horovod.torch as hvd  # ranks
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler  # ranks

import ringprune as rp  # ringprune

EPOCHS, BATCH, PARTS, RATE = 20, 32, 2, 4e-3  # BATCH: images of a rank and step, in PARTS backward passes


class Net(nn.Module):
    """A small transformer that reads an image row by row: ``(batch, 8, 8)`` to the scores of 10 digits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The scores ``(batch, 10)`` of ``images``."""
        return self.head(self.body(self.embed(images) + self.place).mean(1))


def main(folder: Path) -> None:
    """Train; after every epoch validate and save into ``folder``."""
    hvd.init()  # ranks
    first = hvd.rank() == 0  # ranks
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # ranks: else what names no GPU is on the first one, of all
    folder.mkdir(parents=True, exist_ok=True)

    bunch = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(1797))  # the same on every rank
    images = (torch.from_numpy(bunch.images).float() / 8 - 1)[order]
    labels = torch.from_numpy(bunch.target).long()[order]
    train = TensorDataset(images[400:], labels[400:])
    held_out = images[:400].to(device), labels[:400].to(device)
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), drop_last=True)  # ranks: shares, all as large
    loader = DataLoader(train, BATCH // PARTS, sampler=sampler, drop_last=True)
    steps_per_epoch = len(loader) // PARTS

    torch.manual_seed(0)
    model = Net().to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # ranks
    adamw = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.01)
    optimizer = rp.DistributedOptimizer(adamw, model.named_parameters(), policy="iwp", model=model)  # ringprune
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, epochs=EPOCHS, steps_per_epoch=steps_per_epoch, cycle_momentum=False
    )

    mine = folder / f"rank{hvd.rank()}.pt"  # ranks: each has moments and a rest of its own
    begin = 0
    if (saved := load(mine)) is not None:
        model.load_state_dict(saved["model"])  # before the optimizer's
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        begin = saved["epoch"]

    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)  # ranks
        batches = iter(loader)
        for _ in range(steps_per_epoch):
            optimizer.zero_grad()
            for _ in range(PARTS):
                inputs, wanted = (tensor.to(device) for tensor in next(batches))
                (cross_entropy(model(inputs), wanted) / PARTS).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the rank's own gradient; right with local steps only
            optimizer.step()
            schedule.step()
        if epoch + 1 == EPOCHS:
            optimizer.flush()  # ringprune: what the last interval has left; weights are the same on all ranks then
        with optimizer.shared_weights():  # ringprune: what the ranks agree on; in between each has its own weights
            score = validate(model, *held_out)
        if first:  # ranks
            print(f"epoch {epoch + 1:2}: {100 * score:.2f} % of {len(held_out[1])} held out", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(state | {"schedule": schedule.state_dict(), "epoch": epoch + 1}, mine)

    if first:  # ranks
        torch.save(model.state_dict(), folder / "model.pt")  # after flush() one file serves
    if first and begin < EPOCHS:  # ranks
        stats = optimizer.stats()  # ringprune
        print(f"bytes: 1/{stats['wire_ratio']:.0f} of what dense fp32 sends")  # ringprune


@torch.no_grad()
def validate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of ``images`` that ``model`` reads right."""
    model.eval()
    part = slice(hvd.rank(), None, hvd.size())  # ranks: each looks at its share, and the counts are added
    right = (model(images[part]).argmax(1) == labels[part]).sum()
    model.train()
    return hvd.allreduce(right, op=hvd.Sum).item() / len(labels)  # ranks


def load(file: Path) -> dict | None:
    """The state that ``file`` holds, of the same epoch on all ranks; None before there is any."""
    saved = torch.load(file, weights_only=True) if file.exists() else None
    epochs = hvd.allgather_object(saved["epoch"] if saved else 0)  # ranks
    if epochs[hvd.rank()] < max(epochs):  # ranks: it was stopped when some had replaced their files; all were written
        os.replace(file.with_suffix(".new"), file)
        saved = torch.load(file, weights_only=True)
    return saved


def save(state: dict, file: Path) -> None:
    """Write ``state``; all ranks replace their files once all are written, so that :func:`load` finds one epoch."""
    torch.save(state, file.with_suffix(".new"))
    hvd.barrier()  # ranks
    os.replace(file.with_suffix(".new"), file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("run"), help="where checkpoints lie; run")
    main(parser.parse_args().folder)
