"""The limits that benchmarks print: how many operations a step's libraries have to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import machine
from benchmarks.workload import convolution_backward_flops

aten = torch.ops.aten


@pytest.mark.parametrize("convolution", [F.conv2d, F.conv_transpose2d])
@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize("both", [True, False])
def test_each_gradient_of_a_convolution_costs_its_forward(
    convolution: Callable[..., Tensor], groups: int, both: bool
) -> None:
    image = torch.randn(2, 32, 16, 16, requires_grad=both)
    filters = torch.randn(32, 32 // groups, 3, 3, requires_grad=True)
    formulas = {aten.convolution_backward: convolution_backward_flops}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        convolution(image, filters, stride=2, padding=1, groups=groups).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    gradients = 2 if both else 1
    assert counts[aten.convolution_backward] == gradients * counts[aten.convolution]


def test_kinds_of_machines_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors of one name may differ in generation and matrix instructions: their results are
    kept apart."""
    seen = []
    features = "avx2 avx512f", "avx2 avx512f avx512_bf16", "avx512_bf16 amx_bf16"
    for flags, model in (*zip(features, "111", strict=True), (features[2], "2")):
        fields = {
            "flags": flags, "model name": "Intel(R) Xeon(R) Platinum 8481C", "cpu family": "6",
            "model": model,
        }  # fmt: skip
        for module in ("benchmarks.machine", "dicp.machine"):
            monkeypatch.setattr(f"{module}.processor_fact", fields.__getitem__)
        seen.append(machine.kind("cpu"))
    assert len(set(seen)) == 4
    assert seen[2].startswith("intel-r-xeon-r-platinum-8481c-family-6-model-1-")
    assert seen[2].endswith("-amx_bf16")
