#!/usr/bin/env python3
"""Writes what ``ringprune advise`` knows of models: shapes of all tensors, and a timeline from operation counts."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[1:1] = [str(HERE.parent), str(ROOT / "examples")]

from models import PUBLISHED
from replays.counted import counted, meta

# Half of a Quadro P4000's 5.3 TFLOP/s in float32, as in the profiles beside this file.
FLOPS = 2.65e12

INPUTS: dict[str, tuple[list[Tensor], str]] = {
    "alexnet": ([meta(64, 3, 224, 224)], "64 images of 224 x 224"),
    "vgg19": ([meta(16, 3, 224, 224)], "16 images of 224 x 224"),
    "resnet18": ([meta(32, 3, 224, 224)], "32 images of 224 x 224"),
    "resnet50": ([meta(32, 3, 224, 224)], "32 images of 224 x 224"),
    "bert_base": ([meta(8, 128, words=True), meta(8, 128, words=True)], "8 sequences of 128 tokens"),
    "lstm_lm": ([meta(32, 20, words=True)], "32 times 20 words"),
    "lstm_translation": ([meta(64, 30, words=True)] * 2, "64 pairs of 30 words"),
}
"""Inputs of one step, and what they are."""

TARGET = ROOT / "ringprune" / "advise" / "models.json"


def known(name: str) -> dict[str, Any]:
    """What is known of a model: its batch, and each layer's name, shapes, forward and backward milliseconds."""
    with torch.device("meta"):
        model = PUBLISHED[name]()
    inputs, batch = INPUTS[name]
    layers = []
    for layer in counted(name, model, inputs, FLOPS, "").layers:
        shapes = [list(p.shape) for p in model.get_submodule(layer.name).parameters(recurse=False)]
        layers.append([layer.name, shapes, round(layer.forward_ms, 4), round(layer.backward_ms, 4)])
    return {"batch": batch, "layers": layers}


def text() -> str:
    """The file, one line per model."""
    lines = ",\n ".join(f"{json.dumps(name)}: {json.dumps(known(name))}" for name in INPUTS)
    return f'{{"teraflops": {FLOPS / 1e12:g}, "models": {{\n {lines}\n}}}}\n'


if __name__ == "__main__":
    TARGET.write_text(text())
    print(f"wrote {TARGET.relative_to(ROOT)}")
