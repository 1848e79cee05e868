"""Stage 6: packed values are summed over the ranks."""

from ringprune.reduction.balanced import BalancedReduction
from ringprune.reduction.choice import RingChoice, choose_ring
from ringprune.reduction.dealt import Dealing, dealing
from ringprune.reduction.mean import Average, Mean
from ringprune.reduction.merge import among
from ringprune.reduction.phased import PhasedSum
from ringprune.reduction.rows import GatheredRows, OwnedRows, RowSets, spread, sum_rows
from ringprune.reduction.sparse import GatheredReduction, SparseReduction

__all__ = [
    "Average",
    "BalancedReduction",
    "Dealing",
    "GatheredReduction",
    "GatheredRows",
    "Mean",
    "OwnedRows",
    "PhasedSum",
    "RingChoice",
    "RowSets",
    "SparseReduction",
    "among",
    "choose_ring",
    "dealing",
    "spread",
    "sum_rows",
]
