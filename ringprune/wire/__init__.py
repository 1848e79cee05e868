"""How index sets and values look on the wire (docs/wire-format.md)."""

from ringprune.wire.indices import MAX_POSITIONS, WIRE_VERSION, decode_indices

__all__ = ["MAX_POSITIONS", "WIRE_VERSION", "decode_indices"]
