"""A made-up chip without int64 and float64, which takes them through an adaptor file.

    PYTHONPATH=test pytest -p stand_in.small_chip --backend cpugraph test/op/test_pointwise.py

The targets lose the two dtypes for the run. What eager gives in float64 is rounded as where its
inputs are float32, and counts as exact to a rounding of that: the chip knows no more digits.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp import compare
from dicp.target import find_target
from dicp.testing import cases, evaluation, inputs
from dicp.testing.backends import BackendUnderTest
from dicp.torch_private import pytree

FILE = Path(__file__).with_suffix(".yaml")
MISSING = {torch.int64, torch.float64}
ROUNDINGS = 2.0**29
"""Roundings of float64 in one of float32."""


def pytest_configure(config: pytest.Config) -> None:
    monkeypatch = pytest.MonkeyPatch()
    config.add_cleanup(monkeypatch.undo)
    for name in ("cpu", "tops"):
        use(monkeypatch, name)


def use(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Turn a target into the chip."""
    target = find_target(name)
    monkeypatch.setenv("DICP_CONVERT_CONFIG", str(FILE))
    facts = replace(target.facts, dtypes=target.facts.dtypes - MISSING)
    monkeypatch.setattr(type(target), "facts", facts)
    ulps = compare.FLOOR_ULPS.get(torch.float32, 1.0) * ROUNDINGS
    monkeypatch.setitem(compare.FLOOR_ULPS, torch.float64, ulps)
    if cases.evaluate is evaluation.evaluate:
        monkeypatch.setattr(cases, "evaluate", _evaluate)
        monkeypatch.setattr(cases, "special_columns", _special_columns)
    limits = (*target.limits, "dtype torch.int64", "dtype torch.float64")
    monkeypatch.setattr(BackendUnderTest, "limits", limits)


def _evaluate(call: Any, groups: Any, flags: Any) -> Any:
    results = evaluation.evaluate(call, groups, flags)
    if hasattr(call, "_torchdynamo_orig_callable"):
        return results
    try:
        narrowed = evaluation.evaluate(call, pytree.tree_map(_rounded, groups), flags)
    except Exception:  # the case has float64 only
        return results
    for wide, short in zip(results, narrowed, strict=True):
        pairs = zip(wide.outputs + wide.grads, short.outputs + short.grads, strict=True)
        for one, other in pairs:
            _round_to(one, other, wide.inputs)
    return results


def _special_columns(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of int64, those of int32: the file refuses larger numbers."""
    if dtype != torch.int64:
        return inputs.special_columns(count, dtype)
    return [column.long() for column in inputs.special_columns(count, torch.int32)]


def _rounded(value: Any) -> Any:
    is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float64
    return inputs.clone_exactly(value).float() if is_wide else value


def _round_to(wide: Any, narrowed: Any, inputs: Any) -> None:
    """`wide` as `narrowed`, unless it shows an input: views keep their digits."""
    if not isinstance(wide, torch.Tensor) or wide.dtype != torch.float64:
        return
    if not isinstance(narrowed, torch.Tensor) or narrowed.dtype != torch.float32:
        return
    given = [x.untyped_storage().data_ptr() for x in pytree.tree_leaves(inputs)]
    if not wide._is_zerotensor() and wide.untyped_storage().data_ptr() not in given:
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # an expanded tensor
            wide.copy_(narrowed)
