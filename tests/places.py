"""Where tests that hypothesis gives their arguments run; others have the fixture ``device``."""

import pytest
import torch

__all__ = ["PLACES"]

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]
