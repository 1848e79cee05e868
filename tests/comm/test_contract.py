"""The contract of communicators on simulated ranks; tests/mpi runs it as real jobs."""

import pytest

from ringprune.comm import Communicator, simulate
from tests.comm.contract import CHECKS, Check


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_simulated(check: Check, size: int) -> None:
    simulate(size, check, timeout=20)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, 4, 8])
@pytest.mark.parametrize("name", ["nodes_hold_every_rank_once", "sums_of_nodes_are_the_sum_of_all"])
def test_simulated_nodes(name: str, size: int, ranks_per_node: int) -> None:
    def check(comm: Communicator) -> None:
        CHECKS[name](comm)
        nodes = comm.divide()
        assert nodes.count == -(-size // ranks_per_node)
        assert nodes.local.size == min(ranks_per_node, size - comm.rank // ranks_per_node * ranks_per_node)

    simulate(size, check, timeout=20, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_parts_of_simulated_ranks_keep_the_contract(check: Check) -> None:
    def both(comm: Communicator) -> None:
        nodes = comm.divide()
        check(nodes.local)
        if nodes.across is not None:
            check(nodes.across)

    simulate(5, both, timeout=20, ranks_per_node=2)
