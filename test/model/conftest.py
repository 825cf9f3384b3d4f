"""Fixtures of the model tests: the comparison with eager, and folders of real weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp.testing import counts, torchvision_operators

torchvision_operators.define()

from .fp64 import AgainstEager  # noqa: E402


@pytest.fixture
def against_eager(
    request: pytest.FixtureRequest, backend: Any, dynamic: bool
) -> Iterator[AgainstEager]:
    """The comparison for `--backend NAME --dynamic true|false`."""
    torch.manual_seed(0)
    backend.start_over()
    yield AgainstEager(backend.inner, dynamic, backend.device)
    counts.count(request.config, request.node.nodeid, backend)
    if backend.name == "topsgraph":
        check_share(backend)


def check_share(backend: Any) -> None:
    """Of each model's calls 95 of 100 or more are in one graph for each direction, beside what is
    computed once, but for those on dtypes that the chip lacks."""
    for report in backend.reports():
        lacking = [n for n in report.nodes if n.decision == "eager" and "dtype" in str(n.reason)]
        eager = [n for n in report.nodes if n.decision == "eager" and n not in lacking]
        assert len(eager) <= 0.05 * len(report.nodes), eager
        graphs = [kernel.name for kernel in report.kernels if not kernel.name.startswith("once")]
        assert lacking or len(graphs) <= 1, graphs


@pytest.fixture
def weights() -> Callable[[str], Path]:
    """The folder named by an environment variable; the test is skipped where it is not set."""

    def folder(variable: str) -> Path:
        value = os.environ.get(variable, "")
        if not value:
            pytest.skip(f"set {variable} to a folder of weights to run this test")
        return Path(value)

    return folder
