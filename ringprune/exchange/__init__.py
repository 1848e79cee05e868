"""One exchange: the seven stages in order, bucket by bucket; the only place that knows the order.

::

   backward hook of one parameter  (buckets fill in reverse order of the forward pass)
        |
        v
   [1] accumulate   residual += corrected gradient             local   residual.py
   [2] score        importance(residual, weight)               local   importance.py     only on this step's roots
   [3] select       scores -> proposed indices                 local   selection.py      only on this step's roots
   [4] agree        proposals -> one index set on every rank   comm    agreement.py, wire/
   [5] pack         take the values at the indices             local   packing.py
   [6] reduce       sum the packed values over the ranks       comm    reduction/, wire/
   [7] unpack       write the average into param.grad          local   packing.py
        |
        v
   optimizer.step()

On the roots [1] to [3] are one pass over memory (``ops.accumulate_select``); the other ranks only accumulate. What
enters [1] and where [7] writes is given by the caller: gradients and ``param.grad`` in gradient mode.

A bucket takes one lane (``lane.py``): packed, dense, or dense in fewer bits. Lanes run as a pipeline during backward:
each turn of a lane waits for its message under way and starts the next, and turns are taken in the same order on every
rank.
"""

from ringprune.exchange.exchange import Exchange

__all__ = ["Exchange"]
