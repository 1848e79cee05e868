"""The parts of bench_exchange.py: what is exchanged, by whom, how it is timed, counted and shown."""
