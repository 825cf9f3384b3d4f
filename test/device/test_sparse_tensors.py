"""Sparse tensors, which the device does not have."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.sweep

SPARSE = """
import torch, torch_dipu
indices, values = torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 2.0])

def gradient():
    table = torch.ones(3, 2, device="dipu", requires_grad=True)
    rows = indices[0].to("dipu")
    torch.nn.functional.embedding(rows, table, sparse=True).sum().backward()

for make in (
    lambda: torch.sparse_coo_tensor(indices.to("dipu"), values.to("dipu"), (2, 2)),
    lambda: torch.sparse_coo_tensor(indices, values, (2, 2)).to("dipu"),
    lambda: torch.ones(2, device="dipu").to_sparse(),
    lambda: torch.ones(2, 2, device="dipu").to_sparse_csr(),
    lambda: torch.eye(2).to_sparse_csr().to("dipu") @ torch.ones(2, 2, device="dipu"),
    gradient,
):
    try:
        make()
    except NotImplementedError as error:
        text = str(error)
        assert "the device has no sparse tensors; keep them on the CPU" in text, text
    else:
        raise AssertionError("a sparse tensor was made")
print("all well")
"""


def test_sparse_tensors_are_refused(run: Any) -> None:
    """By constructors, moves and gradients, with an error that says what to do."""
    assert run(SPARSE, DIPU_MOCK_CUDA="false").stdout.splitlines()[-1] == "all well"
