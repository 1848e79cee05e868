"""Predicts how long a training step takes under a policy, without running anything: pure functions, no communicator."""

from ringprune.prediction.choice import MARGIN, Mixture, best, cheaper_route, crossover, mix
from ringprune.prediction.link import GOODPUT, LATENCY_SECONDS, Link
from ringprune.prediction.speeds import CPU, DEVICES, GPU, Speeds
from ringprune.prediction.step import Prediction, Setting, predict
from ringprune.prediction.workload import Layer, Workload, flat

__all__ = [
    "CPU",
    "DEVICES",
    "GOODPUT",
    "GPU",
    "LATENCY_SECONDS",
    "MARGIN",
    "Layer",
    "Link",
    "Mixture",
    "Prediction",
    "Setting",
    "Speeds",
    "Workload",
    "best",
    "cheaper_route",
    "crossover",
    "flat",
    "mix",
    "predict",
]
