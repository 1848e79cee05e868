"""bench_embedding.py finds its parts beside it, and the models among the examples."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "mpi_scripts"), str(ROOT / "examples")]
