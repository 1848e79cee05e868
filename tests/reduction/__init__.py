"""The reductions: ring, sparse sums, and the choice between ring and library."""
