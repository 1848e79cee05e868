"""Which lane a bucket goes by."""

from dataclasses import replace

import torch

from ringprune.comm.communicator import Nodes
from ringprune.exchange.ahead import AheadLane
from ringprune.exchange.balanced import BalancedLane
from ringprune.exchange.dense import DenseLane
from ringprune.exchange.exploring import AheadExploringLane, ExploringLane
from ringprune.exchange.kept import RoundedLane
from ringprune.exchange.lane import Lane, Setting
from ringprune.exchange.node import NodeLane
from ringprune.exchange.own import OwnLane
from ringprune.exchange.packed import PackedLane
from ringprune.exchange.rows import RowsLane
from ringprune.plan import Bucket
from ringprune.policies.policy import Policy

__all__ = ["exchanging", "kind_of", "lane_of", "longest_sum"]


def kind_of(bucket: Bucket, policy: Policy) -> type[PackedLane | RoundedLane | DenseLane | RowsLane]:
    """The way that a bucket takes."""
    if bucket.route == "rows":
        return RowsLane
    if bucket.route == "packed":
        if policy.index_sets == "balanced":
            return BalancedLane
        if policy.index_sets != "shared":
            return OwnLane
        if policy.explore_by == "rank":
            return AheadExploringLane if policy.lookahead else ExploringLane
        return AheadLane if policy.lookahead else PackedLane
    return RoundedLane if policy.dense_values != "fp32" and bucket.dtype == torch.float32 else DenseLane


def lane_of(bucket: Bucket, setting: Setting, nodes: Nodes | None) -> Lane:
    """What exchanges a bucket, between nodes where there are ``nodes``."""
    kind = kind_of(bucket, setting.policy)
    if nodes is None:
        return kind(bucket, setting)
    between = None if nodes.across is None else kind(bucket, replace(setting, comm=nodes.across))
    return NodeLane(bucket, setting, nodes, between)


def exchanging(lane: Lane) -> Lane:
    """The lane that exchanges with other ranks under the policy; itself where this rank leaves that to another."""
    return lane.between or lane if isinstance(lane, NodeLane) else lane


def longest_sum(bucket: Bucket, policy: Policy) -> float:
    """Bytes of a bucket's float32 sum after warm-up; 0 where pairs or rows are added up instead."""
    packed = bucket.route == "packed"
    pairs = packed and policy.index_sets != "shared"
    rows = bucket.route == "rows" and policy.rows is not None and policy.rows.way in ("gather", "owners")
    if pairs or rows or (policy.values if packed else policy.dense_values) != "fp32":
        return 0.0
    return 4 * bucket.numel * (policy.density.target if packed else 1.0)
