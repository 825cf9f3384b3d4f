"""How much runs as GE operators: of core ATen, and of a part of the operator cases.

The whole lists are counted by `test/ascend_scripts/run_test_ops.sh all --eager-nodes
--without-dtypes float64`, and the models by `run_test_models.sh all --eager-nodes`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend_recorder import record
from torch.utils import _pytree as pytree

from dicp.dynamo_bridge.conversion import operator_table
from dicp.testing import Op
from dicp.testing.coverage import all_cases
from dicp.vendor.ascend import AscendTarget

ELSEWHERE = {
    "aten._fft_c2r.default", "aten._fft_r2c.default",  # complex
    "aten._local_scalar_dense.default",  # a number for the host
    "aten.nonzero.default",  # its size depends on data
    "aten.resize_.default",  # in place
}  # fmt: skip
"""Core ATen that stays eager: GE's operators cannot express it."""


def test_core_aten_has_rules() -> None:
    rows = operator_table(AscendTarget())
    assert {row.op for row in rows if row.decision == "eager"} == ELSEWHERE


EVERY = 2
"""One case of so many is looked at here."""


def sample() -> list[Op]:
    """Of the cases that expect no eager calls of any target."""
    cases = [c for c in all_cases() if torch.float32 in c.dtypes and c.expect == "native"]
    return [c for c in cases if c.fullgraph and not c.unbacked][::EVERY]


def eager_nodes(case: Op) -> list[str]:
    """What a case leaves to eager, in float32."""
    variant = next(v for v in case.variants() if v.dtype == torch.float32)
    arguments = case.build(variant, {})
    flags = iter(case.grad_flags())
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and next(flags) and leaf.is_floating_point():
            leaf.requires_grad_(True)
    target = record(case.fn, *arguments)
    nodes: list[Any] = [node for program in target.programs for node in program.nodes]
    return [f"{case.name}: {node.op}: {node.reason}" for node in nodes if node.decision == "eager"]


@pytest.mark.filterwarnings("ignore")
def test_operator_cases_leave_nothing_to_eager() -> None:
    cases = sample()
    left = {case.name: found for case in cases if (found := eager_nodes(case))}
    assert len(cases) > 40 and not left
