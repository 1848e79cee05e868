#!/usr/bin/env python3
"""Writes the profiles beside it, from the models in ``examples/models`` and their operation counts."""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent.parent / "examples")]

from models import PUBLISHED
from models.lstm_lm import lstm_lm
from replays.counted import counted, meta

from ringprune.profiles.format import write

# Half of a Quadro P4000's 5.3 TFLOP/s in float32, the GPU of the P3 paper.
FLOPS = 2.65e12

MODELS = {
    "resnet50": (PUBLISHED["resnet50"], [meta(32, 3, 224, 224)], "32 images of 224 x 224"),
    "vgg19": (PUBLISHED["vgg19"], [meta(16, 3, 224, 224)], "16 images of 224 x 224"),
    "lstm_translation": (
        PUBLISHED["lstm_translation"],
        [meta(64, 30, words=True), meta(64, 30, words=True)],
        "64 pairs of 30 words",
    ),
    "bert_base": (
        PUBLISHED["bert_base"],
        [meta(8, 128, words=True), meta(8, 128, words=True)],
        "8 sequences of 128 tokens",
    ),
    "embedding_lm": (lambda: lstm_lm(100_000), [meta(32, 20, words=True)], "32 times 20 words of 100,000"),
}
"""Model, inputs, and what they are."""


def main() -> None:
    """Write them all."""
    for name, (build, inputs, batch) in MODELS.items():
        with torch.device("meta"):
            model = build()
        provenance = (
            f"computed: operations of the forward pass, counted by torch.utils.flop_counter, of {batch}, at "
            f"{FLOPS / 1e12:g} TFLOP/s, and twice as many backward; layers without matrix products take no time"
        )
        profile = counted(name, model, inputs, FLOPS, provenance)
        write(profile, HERE / f"{name}.json")
        print(f"{name}: {profile.entries:,} entries, {len(profile.layers)} layers, {profile.compute_seconds:.3f} s")


if __name__ == "__main__":
    main()
