"""The work on entries, where the tensors live: one function per op, over compiled kernels or torch (books: numba).

A bucket's state is flat: the entries of its tensors one after another, with a table of T + 1 offsets. State is
float32; gradients and weights may be float32, float16 or bfloat16. Whoever computes, the bits are the same. Positions
are int32, so a bucket has fewer than 2**31 entries. On CUDA nothing waits for the device, where the compiled library
has kernels for it; torch's own operations look at the indices first.
"""

from ringprune.ops.accumulate import accumulate
from ringprune.ops.accumulate_select import TALLY, Hints, accumulate_select
from ringprune.ops.checks import MAX_POSITIONS
from ringprune.ops.count_nonfinite import count_nonfinite
from ringprune.ops.crc32 import crc32
from ringprune.ops.decode_books import decode_books
from ringprune.ops.encode_books import BLOCK as BOOK_BLOCK
from ringprune.ops.encode_books import book_body_bytes, book_bytes, encode_books
from ringprune.ops.gather import gather
from ringprune.ops.give_back import give_back
from ringprune.ops.importance import importance
from ringprune.ops.library import backend, native_build, native_path
from ringprune.ops.put import put
from ringprune.ops.select import PAD, select
from ringprune.ops.sent import Sent, may_wait, take_lazily
from ringprune.ops.share_momentum import Adams, share_momentum
from ringprune.ops.square_sum import square_sum
from ringprune.ops.take import take

__all__ = [
    "BOOK_BLOCK",
    "MAX_POSITIONS",
    "PAD",
    "TALLY",
    "Adams",
    "Hints",
    "Sent",
    "accumulate",
    "accumulate_select",
    "backend",
    "book_body_bytes",
    "book_bytes",
    "count_nonfinite",
    "crc32",
    "decode_books",
    "encode_books",
    "gather",
    "give_back",
    "importance",
    "may_wait",
    "native_build",
    "native_path",
    "put",
    "select",
    "share_momentum",
    "square_sum",
    "take",
    "take_lazily",
]
