"""Predicts how long a training step takes under a policy, without running anything: pure functions, no communicator."""

from ringprune.prediction.choice import MARGIN, Mixture, best, cheaper_route, crossover, mix
from ringprune.prediction.link import GOODPUT, LATENCY_SECONDS, Kind, Link, MeasuredLink, Network
from ringprune.prediction.messages import check_predictable
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
    "Kind",
    "Layer",
    "Link",
    "MeasuredLink",
    "Mixture",
    "Network",
    "Prediction",
    "Setting",
    "Speeds",
    "Workload",
    "best",
    "cheaper_route",
    "check_predictable",
    "crossover",
    "flat",
    "mix",
    "predict",
]
