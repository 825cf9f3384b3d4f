"""Frozen parameters: folded and converted once, and still right."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dicp.dynamo_bridge.backend import Backend


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def network() -> Net:
    torch.manual_seed(0)
    model = Net()
    model(torch.randn(16, 3, 8, 8))  # running statistics that are not the initial ones
    return model.eval()


def test_frozen_convolution_is_folded_and_right() -> None:
    model = network()
    x = torch.randn(2, 3, 8, 8)
    backend = Backend("cpu", freeze=True)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        for _ in range(3):
            torch.testing.assert_close(compiled(x).double(), expected, atol=1e-5, rtol=1e-5)
    ops = [node.op for node in backend.reports[-1].nodes]
    assert not any("batch_norm" in op for op in ops), ops


def test_frozen_parameters_are_read_once() -> None:
    model = network()
    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend=Backend("cpu", freeze=True))
    with torch.no_grad():
        before = compiled(x).clone()
        model.norm.running_var.mul_(4.0)
        torch.testing.assert_close(compiled(x), before)
        fresh = torch.compile(copy.deepcopy(model), backend=Backend("cpu"))(x)
    assert not torch.allclose(fresh, before)


def test_training_is_not_frozen() -> None:
    model = network().train()
    x = torch.randn(4, 3, 8, 8)
    backend = Backend("cpu", freeze=True)
    compiled = torch.compile(model, backend=backend)
    first = compiled(x).detach().clone()
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    assert not torch.allclose(compiled(x), first)


class Returned(nn.Module):
    """Results that depend on parameters alone, one of them seen twice, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        doubled = self.weight.exp() * 2
        return doubled, doubled.t(), self.weight.sum(0).expand(4, 3), x @ doubled.t() + self.calls


def test_what_the_caller_gets_is_his() -> None:
    model, plain = Returned(), Returned()
    compiled = torch.compile(model, backend=Backend("cpu", freeze=True))
    x = torch.randn(5, 3)
    with torch.no_grad():
        for _ in range(3):
            expected, found = plain(x), compiled(x)
            torch.testing.assert_close(found, expected)
            assert [f.stride() for f in found] == [e.stride() for e in expected]
            assert found[0].data_ptr() == found[1].data_ptr()
            found[0].zero_()
            found[2].untyped_storage().fill_(0)
