"""PyTorch's own `TestCase` and `run_tests`, with the device registered."""

from torch.testing._internal.common_utils import TestCase, run_tests

import torch_dipu  # noqa: F401

__all__ = ["TestCase", "run_tests"]
