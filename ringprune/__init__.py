"""RingPrune."""
