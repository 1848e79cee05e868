"""Train a small GPT with the Trainer of transformers, whose DistributedDataParallel averages nothing.

    torchrun --nproc-per-node 2 examples/train_charlm_transformers.py
    torchrun --nproc-per-node 2 examples/train_charlm_transformers.py --hook

RingPrune exchanges instead. With --hook DDP stays at work and hands RingPrune its gradients: one exchange a step.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from data.source_text import SYMBOLS, corpus, windows
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ringprune as rp

LENGTH = 63  # characters that the model reads at a time, and one more


class LocalSteps(Trainer):
    """A Trainer for an optimizer of RingPrune: between exchanges the ranks' weights differ."""

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """DDP, which the Trainer has put around the model, averages nothing."""
        model.require_backward_grad_sync = False
        return super().training_step(model, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, and predict with, what the ranks share."""
        with self.distributed.shared_weights():
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """What is saved is what rank 0 has: after a flush it serves every rank."""
        self.distributed.flush()
        super()._save_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        """Nothing that is held back is to come on top of it."""
        self.distributed.flush()
        super()._load_best_model()

    @property
    def distributed(self) -> Any:
        """The optimizer, without what Accelerate has put around it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


class Hooked(Trainer):
    """A Trainer that gives DDP a hook before the first step."""

    hook: Any = None

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """DDP averages through RingPrune."""
        if self.hook is None:
            policy = rp.IWP(density=0.05, clip_norm=1.0, warmup=rp.Warmup(20))
            self.hook = rp.ddp_hook(policy, named_parameters=model.named_parameters())
            model.register_comm_hook(None, self.hook)
        return super().training_step(model, *args, **kwargs)


class Text(Dataset):
    """Rows of characters, to be predicted from those before them."""

    def __init__(self, text: Tensor) -> None:
        self.rows = windows(text, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


def main() -> None:
    """Train, evaluate, save, and report what was sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hook", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("build/transformers"), help="for checkpoints")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="a checkpoint to go on from")
    options = parser.parse_args()
    if options.hook and options.resume:
        parser.error(
            "--resume with --hook: what the hook keeps back is not saved here (hook.state_dict(), on every rank)"
        )
    args = TrainingArguments(
        str(options.folder),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
        max_grad_norm=0.0 if options.hook else 1.0,  # a hook's policy clips, before gradients are exchanged
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        save_steps=options.steps // 2,
        load_best_model_at_end=True,
        logging_steps=50,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
    )
    text = corpus()
    torch.manual_seed(1)
    sizes = {"vocab_size": SYMBOLS, "n_positions": LENGTH + 1, "n_embd": 128, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).to(args.device)
    own: dict[str, Any] = {}
    if not options.hook:
        optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, (0.9, 0.95), weight_decay=0.01)
        optimizer = rp.DistributedOptimizer(optimizer, model.named_parameters(), policy="iwp", comm="torch")
        own = {"optimizers": (optimizer, None)}
    kind = Hooked if options.hook else LocalSteps
    trainer = kind(model=model, args=args, train_dataset=Text(text.train), eval_dataset=Text(text.validation), **own)
    trainer.train(resume_from_checkpoint=options.resume)
    if not options.hook:
        optimizer.flush()  # the model that is left is the same on every rank
    loss = trainer.evaluate()["eval_loss"]
    stats = (trainer.hook if options.hook else optimizer).stats()
    if trainer.is_world_process_zero():
        print(
            f"characters with transformers: {stats['steps']} steps, validation loss {loss:.3f}, "
            f"{stats['wire_ratio']:.1f} times fewer bytes than dense"
        )
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # or a process of Gloo may wait for ever, or be aborted, at its end
        time.sleep(0.2)  # Gloo's thread lets go of the barrier; ended while it waits for Python, both wait for ever
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
