"""Random numbers in kernels of every form: the same numbers, and one call for four neighbours."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import TritonRecorder, record
from torch import Tensor

from dicp.dynamo_bridge.backend import Backend
from dicp.gpu import random_groups as draws
from dicp.loop.ir.index import Index, Var
from dicp.vendor.triton.builder import Plan, Workers

FORMS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "elements": (lambda x: F.dropout(x, 0.3), (33, 7)),
    "rows": (lambda x: F.dropout(x.softmax(-1), 0.3), (12, 24)),
    "rows that cut fours apart": (lambda x: F.dropout(x.softmax(-1), 0.3), (12, 23)),
    "long rows": (lambda x: F.dropout(x.softmax(-1), 0.3), (3, 9001)),
    "read again transposed around": (lambda x: torch.rand_like(x).t() + x.t(), (20, 12)),
    "before a norm": (lambda x: F.layer_norm(x + F.dropout(x, 0.3), x.shape[-1:]), (9, 64)),
    "normal rows": (lambda x: (x + torch.randn_like(x)).softmax(-1), (6, 36)),
    "one": (lambda x: x * torch.rand(()) + torch.randint(9, ()), (4,)),
    "almost certain": (lambda x: torch.bernoulli(x, 1.0) + torch.bernoulli(x, 0.0), (64,)),
}


@pytest.mark.parametrize("name", FORMS)
def test_numbers_are_those_of_the_host(name: str, dynamic: bool, tmp_path: Path) -> None:
    """However a kernel walks its elements: the host's walks them otherwise."""
    fn, shape = FORMS[name]
    x = torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape)
    found = []
    for target in ("cpu", "triton"):
        torch._dynamo.reset()
        backend = Backend(target, cache_dir=tmp_path)
        torch.manual_seed(5)
        found.append(torch.compile(fn, backend=backend, dynamic=dynamic)(x))
        assert not any(n.decision == "eager" for n in backend.reports[-1].nodes)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def multiplications(fn: Callable[..., Any], *inputs: Tensor) -> float:
    """Those by the generator's factors in the code for each element."""
    (program,) = record(fn, *inputs, target=TritonRecorder()).programs
    plan, workers = Plan(program.serialized, program.kernel_texts, 90), Workers()
    (step,) = (s for s in plan.program["steps"] if "kernel" in s)
    job = plan.job(step, plan.variant(step, {}))
    try:
        answer = workers.compile(job.request(job.blocks()))
    finally:
        workers.close()
    held = torch.Size(job.blocks().values()).numel() / (32 * answer["warps"])
    factors = [f"{f - wrap}" for f in (0xD2511F53, 0xCD9E8D57) for wrap in (0, 2**32)]
    return len(re.findall(rf"\bmul\.\S+\s.*, (?:{'|'.join(factors)});", answer["ptx"])) / held


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(residual + F.dropout(x, 0.1), x.shape[-1:], weight)


MASKED: dict[str, Callable[..., Any]] = {
    "elements": lambda x, *_: F.dropout(x, 0.1),
    "rows": add_norm,
}


@pytest.mark.parametrize("name", MASKED)
def test_four_neighbours_share_a_call(name: str) -> None:
    """Seven rounds of two multiplications; those of the last are made in halves.

    The mask, whose elements are smaller, is laid out as the numbers beside it: nothing is drawn
    again for it.
    """
    x, weight = (torch.ones(s, dtype=torch.bfloat16) for s in ((2048, 1024), (1024,)))
    assert multiplications(MASKED[name], x, x, weight) < 4.5


ROW, COLUMN = Var(0, 8), Var(1, 8)


@pytest.mark.parametrize(
    "terms, found",
    [
        ([(ROW, 8), (COLUMN, 1)], [(ROW, 2)]),
        ([(COLUMN, 1)], []),
        ([(ROW, 7), (COLUMN, 1)], None),
        ([(ROW, 8), (COLUMN, 2)], None),
        ([(ROW, 8)], None),
    ],
)
def test_an_index_is_cut_where_its_blocks_of_four_begin(terms: Any, found: Any) -> None:
    cut = draws.split(Index(0, tuple(terms)), 4)
    assert cut == (None if found is None else (Index(0, tuple(found)), COLUMN))
