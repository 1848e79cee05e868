"""The picture of ``ringprune advise`` is of the setting that its table is of."""

from functools import partial
from typing import Any

import pytest

import ringprune as rp
from ringprune.advise.known import workload
from ringprune.advise.rows import DENSE, curve, rows_of
from ringprune.prediction import CPU, Link, Setting

RATE = 1e10


@pytest.mark.parametrize("changed", [{}, {"groups": True}, {"overlap": False}, {"bucket_bytes": 1 << 20}])
def test_the_curve_goes_through_the_table(changed: dict[str, Any]) -> None:
    link_of = partial(Link.of_rate, latency_seconds=50e-6)
    setting = Setting(workload("resnet50"), 16, link_of(RATE), CPU, **changed)
    methods = {DENSE: rp.Dense(), "iwp": rp.IWP(0.01)}
    for row in rows_of(setting, methods, link_of):
        assert curve(setting, methods[row["method"]], [RATE], link_of) == [row["seconds"]]
