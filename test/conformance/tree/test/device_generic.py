"""Tests in the form of PyTorch's own: one passes, and the others fail in all ways there are."""

import os
import time
import unittest

import torch
from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.opinfo.core import UnaryUfuncInfo

NEG = [UnaryUfuncInfo("neg", ref=None, dtypes=(torch.float32,))]


class TestMade(TestCase):
    @dtypes(torch.float32, torch.int64)
    def test_sum(self, device, dtype):
        x = torch.arange(4, device=device, dtype=dtype)
        self.assertEqual((x + x).sum().item(), 12)
        self.assertEqual(x.device.type, torch.device(device).type)

    @ops(NEG, allowed_dtypes=(torch.float32,))
    def test_values(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            self.assertEqual(op(sample.input).cpu(), -sample.input.cpu())

    def test_z_aborts(self, device):
        os.abort()

    def test_y_hangs(self, device):
        time.sleep(3600)

    def test_near(self, device):
        self.assertEqual(torch.ones(3, device=device), torch.full((3,), 1.001, device=device))

    def test_wrong(self, device):
        self.assertEqual(torch.ones(3, device=device), torch.zeros(3, device=device))

    @unittest.skip("of PyTorch's own")
    def test_skipped(self, device):
        raise AssertionError

    def test_unsupported(self, device):
        raise AssertionError


class TestHost(TestCase):
    """No test of a device: it does not run."""

    def test_host(self):
        raise AssertionError


instantiate_device_type_tests(TestMade, globals())

if __name__ == "__main__":
    run_tests()
