"""Train the digits network with Lightning, whose DistributedDataParallel averages nothing.

    python examples/train_digits_lightning.py
    python examples/train_digits_lightning.py --hook

RingPrune exchanges instead. With --hook DDP stays at work and hands RingPrune its gradients: one exchange a step.
"""

import argparse
import time
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

    def __init__(self, *, wrap: bool) -> None:
        super().__init__()
        self.net, self.wrap = DigitsNet(), wrap

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
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LocalSteps(lightning.Callback):
    """Between exchanges the ranks' weights differ: validation sees those they share."""

    def __init__(self) -> None:
        self.shared = ExitStack()

    def on_validation_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Validate what the ranks share."""
        for optimizer in trainer.optimizers:
            self.shared.enter_context(optimizer.shared_weights())

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Go on with this rank's own weights."""
        self.shared.close()

    def on_exception(self, trainer: lightning.Trainer, module: lightning.LightningModule, error: BaseException) -> None:
        """As after validation."""
        self.shared.close()

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """The model that is left is the same on every rank."""
        for optimizer in trainer.optimizers:
            optimizer.flush()


class Trainer(lightning.Trainer):
    """Saves, whoever asks for it, what rank 0 has: after a flush it serves every rank."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """All ranks come here; one that saves because it failed would come alone."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, rp.DistributedOptimizer):
                optimizer.flush()
        super().save_checkpoint(*args, **kwargs)


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
    if args.hook and args.resume:
        parser.error(
            "--resume with --hook: what the hook keeps back is not saved here (hook.state_dict(), on every rank)"
        )
    lightning.seed_everything(1, verbose=False)
    train, held_out = (TensorDataset(*part) for part in digits())
    batches = DataLoader(train, batch_size=32, shuffle=True)
    module = Digits(wrap=not args.hook)
    own: Any = Hook() if args.hook else LocalSteps()
    trainer = Trainer(
        devices=args.devices,
        max_epochs=args.epochs,
        strategy=DDPStrategy(process_group_backend="nccl" if torch.cuda.is_available() else "gloo"),
        callbacks=[own, ModelCheckpoint(args.folder, monitor="right", mode="max")],
        default_root_dir=args.folder,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(module, batches, DataLoader(held_out, batch_size=200), ckpt_path=args.resume)
    stats = (own.hook if args.hook else trainer.optimizers[0]).stats()
    if trainer.is_global_zero:
        right = float(trainer.callback_metrics["right"])
        print(
            f"digits with Lightning: {stats['steps']} steps, {right:.1%} right, "
            f"{stats['wire_ratio']:.1f} times fewer bytes than dense"
        )
    torch.distributed.barrier()  # or a process of Gloo may wait for ever, or be aborted, at its end
    time.sleep(0.2)  # Gloo's thread lets go of the barrier; ended while it waits for Python, both wait for ever
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
