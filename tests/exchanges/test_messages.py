"""The messages of a step, sent once more by themselves."""

from dataclasses import replace

import pytest
import torch
from exchanges.gradients import Gradients
from exchanges.ours import RingPrune

import ringprune as rp
from ringprune.comm import Communicator

SHAPES = {"first": (40, 60), "second": (60, 50), "bias": (50,)}
POLICIES = {
    "one root": rp.IWP(0.05, values="fp16", warmup=rp.Warmup(steps=0)),
    "allgather": rp.DGC(0.05, warmup=rp.Warmup(steps=0)),
    "ring": replace(rp.IWP(0.05, values="int8", warmup=rp.Warmup(steps=0)), reduction="ring"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_same_bytes_are_sent_again_and_no_gradient_changes(policy: rp.Policy) -> None:
    def rank(comm: Communicator) -> None:
        module = Gradients(SHAPES, 0, comm.rank)
        exchange = RingPrune(module, policy, comm, 0)
        for step in range(3):
            module.draw()
            loss = exchange.prepare()
            before = comm.traffic.payload_bytes
            if step == 2:  # the first ones also compare what all ranks were given
                exchange.messages.record()
            exchange.run(loss)
            sent = comm.traffic.payload_bytes - before
        averages = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        exchange.messages.send_again()
        assert comm.traffic.payload_bytes - before == 2 * sent > 0
        now = [parameter.grad for parameter in module.parameters()]
        assert len(now) == len(averages) == len(SHAPES)
        assert all(torch.equal(*pair) for pair in zip(now, averages, strict=True))
        exchange.close()

    rp.simulate(3, rank, timeout=30)


def test_smaller_buckets_send_more_headers() -> None:
    def sent(size: int | None) -> int:
        def rank(comm: Communicator) -> int:
            module = Gradients(SHAPES, 0, comm.rank)
            exchange = RingPrune(module, POLICIES["one root"], comm, 0, size)
            for _ in range(2):  # the first step also compares what all ranks were given
                module.draw()
                before = comm.traffic.payload_bytes
                exchange.run(exchange.prepare())
            count = comm.traffic.payload_bytes - before
            exchange.close()
            return count

        return rp.simulate(2, rank, timeout=30)[0]

    assert sent(None) < sent(4 * 60 * 50)
