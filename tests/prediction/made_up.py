"""Workloads and speeds of which everything is known."""

from dataclasses import replace

from ringprune.prediction import CPU, Layer, Setting, Speeds, Workload

FREE = Speeds(
    provenance="costs nothing",
    accumulate=0.0,
    select=dict.fromkeys(CPU.select, 0.0),
    copy=0.0,
    whole=0.0,
    fill=0.0,
    kept=dict.fromkeys(CPU.kept, 0.0),
    merge=0.0,
    encode_index=0.0,
    decode_index=0.0,
    unite=dict.fromkeys(CPU.unite, 0.0),
    encode_values=dict.fromkeys(CPU.encode_values, 0.0),
    decode_values=dict.fromkeys(CPU.decode_values, 0.0),
    message=0.0,
    tensor=0.0,
)

MODEL = Workload(
    "made up",
    tuple(Layer(f"layer {i}", ((500, 200 + 40 * i), (500,)), 1e-3 * (i + 1), 2e-3 * (i + 1)) for i in range(6)),
    "made up",
)

BUCKET_BYTES = 400_000
"""So that MODEL has a bucket for each of its matrices."""


def at(setting: Setting, bytes_per_second: float) -> Setting:
    """The same on a faster or slower link."""
    return replace(setting, link=replace(setting.link, bytes_per_second=bytes_per_second))
