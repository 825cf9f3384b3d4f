"""Families of models at tiny sizes: inference and a training step, as the adaptation table's."""

from __future__ import annotations

from typing import Any

import pytest

from dicp.conformance.families.adaptation import judge
from dicp.conformance.families.models import FAMILIES, Family
from dicp.target import NO_RULE, NodeReport
from dicp.testing import counts

RUN_TIME_CHECKS = {"aten._assert_scalar.default", "aten._local_scalar_dense.default"}
"""How models check values; these calls stay in eager."""
LIBRARY = "transformers."
"""Operators that the models' library registers: grouped products of mixtures of experts. Graph
compilers leave them to eager; tests of their routines show that the host CPU's target does not."""


def is_expected(node: NodeReport, limits: tuple[str, ...]) -> bool:
    """Whether a call stays in eager on purpose."""
    if node.op in RUN_TIME_CHECKS or (node.op.startswith(LIBRARY) and node.reason == NO_RULE):
        return True
    return bool(limits) and node.reason.startswith(limits)


@pytest.mark.sweep
@pytest.mark.static_only
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_family(request: pytest.FixtureRequest, backend: Any, dynamic: bool, family: Family):
    verdict = judge(family, backend, train=True)
    counts.count(request.config, request.node.nodeid, backend)
    assert verdict.good, verdict.detail
    nodes = [node for report in backend.reports() for node in report.nodes]
    eager = [node for node in nodes if node.decision == "eager"]
    unexpected = [node for node in eager if not is_expected(node, backend.limits)]
    assert backend.allow_eager or not unexpected, unexpected
