"""What bench_embedding.py is made of."""
