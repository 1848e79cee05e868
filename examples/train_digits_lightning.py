"""Train the digits network with Lightning, whose DistributedDataParallel averages nothing.

    python examples/train_digits_lightning.py
    python examples/train_digits_lightning.py --hook

RingPrune exchanges instead. With --hook DDP stays at work and hands RingPrune its gradients: one exchange a step.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning
import torch
from data.digits import digits
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from models.digits_net import DigitsNet
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ringprune as rp


class Digits(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self, steps: int, *, wrap: bool) -> None:
        super().__init__()
        self.net, self.steps, self.wrap = DigitsNet(), steps, wrap

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """The loss on a batch."""
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        """The share of images that it recognises."""
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("right", right, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """SGD along a cosine; the wrapped optimizer takes the place of what DDP does."""
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.wrap:
            self.trainer.strategy.model.require_backward_grad_sync = False  # DDP; before the optimizer is wrapped
            optimizer = rp.DistributedOptimizer(optimizer, self.named_parameters(), policy="iwp", comm="torch")
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps, eta_min=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LocalSteps(lightning.Callback):
    """Between exchanges the ranks' weights differ: validation sees those they share, checkpoints come after a flush."""

    def __init__(self, save_every: int) -> None:
        self.save_every, self.shared = save_every, ExitStack()

    def on_validation_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Validate what the ranks share."""
        self.shared.enter_context(trainer.optimizers[0].shared_weights())

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Go on with this rank's own weights."""
        self.shared.close()

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Lightning saves what rank 0 has: after a flush it serves every rank."""
        if (trainer.current_epoch + 1) % self.save_every == 0:
            trainer.optimizers[0].flush()


class Hook(lightning.Callback):
    """Gives DDP its hook. Lightning's own ``ddp_comm_hook=`` is left out on CPUs, and does not know of parameters."""

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """DDP is there, and has not run yet."""
        policy = rp.IWP(density=0.05, warmup=rp.Warmup(40))
        self.hook = rp.ddp_hook(policy, named_parameters=module.named_parameters())
        trainer.strategy.model.register_comm_hook(None, self.hook)


def main() -> None:
    """Train, validate, save, and report what was sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--hook", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("build/lightning"), help="for checkpoints")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a checkpoint to go on from")
    args = parser.parse_args()
    lightning.seed_everything(1, verbose=False)
    train, held_out = (TensorDataset(*part) for part in digits())
    batches = DataLoader(train, batch_size=32, shuffle=True)
    module = Digits(args.epochs * (len(batches) // args.devices), wrap=not args.hook)
    own = Hook() if args.hook else LocalSteps(save_every=args.epochs)
    trainer = lightning.Trainer(
        devices=args.devices,
        max_epochs=args.epochs,
        strategy=DDPStrategy(process_group_backend="nccl" if torch.cuda.is_available() else "gloo"),
        callbacks=[own, ModelCheckpoint(args.folder, every_n_epochs=args.epochs)],
        default_root_dir=args.folder,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(module, batches, DataLoader(held_out, batch_size=200), ckpt_path=args.resume)
    ratio = (own.hook if args.hook else trainer.optimizers[0]).stats()["wire_ratio"]
    if trainer.is_global_zero:
        right = float(trainer.callback_metrics["right"])
        print(f"digits with Lightning: {right:.1%} right, {ratio:.1f} times fewer bytes than dense")
    torch.distributed.barrier()  # or a process of Gloo may wait for ever, or be aborted, at its end
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
