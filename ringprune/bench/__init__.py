"""Benchmarks: what things cost on this machine; and, for all that measure, clocks, tables and the machine's facts."""
