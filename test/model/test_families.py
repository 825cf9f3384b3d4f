"""Families of models at tiny sizes: inference and a training step, as the adaptation table's."""

from __future__ import annotations

from typing import Any

import pytest

from dicp.conformance.families.adaptation import judge
from dicp.conformance.families.models import FAMILIES, Family
from dicp.testing import counts

RUN_TIME_CHECKS = {"aten._assert_scalar.default", "aten._local_scalar_dense.default"}
"""How models check values; these calls stay in eager."""


@pytest.mark.sweep
@pytest.mark.static_only
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_family(request: pytest.FixtureRequest, backend: Any, dynamic: bool, family: Family):
    verdict = judge(family, backend, train=True)
    counts.count(request.config, request.node.nodeid, backend)
    assert verdict.good, verdict.detail
    nodes = [node for report in backend.reports() for node in report.nodes]
    eager = [node for node in nodes if node.decision == "eager" and node.op not in RUN_TIME_CHECKS]
    unexpected = [n for n in eager if not (backend.limits and n.reason.startswith(backend.limits))]
    assert backend.allow_eager or not unexpected, unexpected
