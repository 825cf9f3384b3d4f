"""Tests of the operator tools run in a folder of their own, with none of the tools' variables.

Graphs with planted faults stay out of the cache: what compilers make of one text is shared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dicp import op_tools


@pytest.fixture(autouse=True)
def own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_builds: None
) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("OP_") or "AUTOCOMPARE" in n]:
        monkeypatch.delenv(name)
    yield tmp_path
    op_tools.clear_features()
