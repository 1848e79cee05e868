"""Data sets of the examples: one file each, and the shards that divide them among the ranks."""
