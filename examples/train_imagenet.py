"""Train a ResNet on a folder with train/<class>/ and val/<class>/, as ImageNet's, with Horovod or RingPrune."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import ranks
import torch
from checkpoint import Checkpoint
from data.image_folder import Files, centre_view, image_folder, prefetch, random_view
from data.shards import Shards, even_share, generator
from distribute import clip_and_step, distribute, shared_weights
from evaluation import Batches, accuracy, average_statistics
from journal import Journal
from models.resnet import resnet18, resnet50
from options import options, total_steps, warmup_then_cosine
from torch import Tensor
from torch.nn.functional import cross_entropy

MODELS = {"resnet18": resnet18, "resnet50": resnet50}


def main() -> None:
    """Train, validate on val/ after every epoch, and report."""
    args = arguments()
    device = ranks.start()
    torch.manual_seed(args.seed + 1000 * ranks.rank())
    train, held_out, classes = image_folder(args.data)
    shards = Shards(len(train.labels), args.batch_size, ranks.rank(), ranks.size(), args.seed)
    steps = total_steps(args, shards.steps_per_epoch)

    model = MODELS[args.model](len(classes)).to(device)
    ranks.broadcast_parameters(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-5)
    optimizer = distribute(optimizer, model, args)  # the only line that knows of RingPrune
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(steps, warmup=steps // 18))

    journal = Journal("imagenet", "validation accuracy", args, optimizer, model, steps)
    saved = Checkpoint(args, steps, model=model, optimizer=optimizer, schedule=schedule, journal=journal)
    start = saved.load()
    for step, (images, labels) in enumerate(batches(train, shards, range(start, steps), args), start):
        optimizer.zero_grad()
        loss = cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1)
        loss.backward()
        clip_and_step(optimizer, model, args)
        schedule.step()
        journal.step(loss)
        if journal.due():
            average_statistics(model)
            with shared_weights(optimizer):
                journal.validated(accuracy(model, share_of(held_out, device, args.image_size)))
            saved.save(step + 1)
            journal.go_on()
        if step + 1 == args.stop_at:
            break
    journal.finish()


def arguments() -> argparse.Namespace:
    """The options shared by all scripts, and the network and the size of its input."""
    parser = options("train_imagenet.py", str(__doc__), epochs=90, batch_size=64, lr=0.2)
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help="the folder with train/ and val/")
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="the network (%(default)s)")
    parser.add_argument("--image-size", type=int, default=224, metavar="PIXELS", help="side of its input (%(default)s)")
    return parser.parse_args()


def batches(train: Files, shards: Shards, steps: range, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Training images and labels of this rank at each step, read ahead of time."""

    def load(job: tuple[int, list[int]]) -> tuple[Tensor, Tensor]:
        epoch, batch = job
        views = [random_view(train.paths[i], args.image_size, generator(args.seed, epoch, i)) for i in batch]
        return torch.stack(views), torch.tensor([train.labels[i] for i in batch])

    return prefetch(load, ((step // shards.steps_per_epoch, shards[step].tolist()) for step in steps))


def share_of(held_out: Files, device: torch.device, size: int) -> Batches:
    """The part of the validation images that this rank looks at, in batches."""
    mine = even_share(len(held_out.labels), ranks.rank(), ranks.size())
    paths, labels = held_out.paths[mine], torch.tensor(held_out.labels[mine])

    def load(start: int) -> Tensor:
        return torch.stack([centre_view(path, size) for path in paths[start : start + 64]])

    starts = range(0, len(paths), 64)  # none, where there are fewer images than ranks
    for start, images in zip(starts, prefetch(load, starts), strict=True):
        yield images.to(device), labels[start : start + 64].to(device)


if __name__ == "__main__":
    main()
