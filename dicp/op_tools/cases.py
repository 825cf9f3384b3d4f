"""Captured calls as conformance cases: shapes, strides, dtypes and values, as TOML without data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

CapturedCall = tuple[str, Sequence[Any], Mapping[str, Any]]


def write_cases(calls: Sequence[CapturedCall]) -> str:
    """One entry per distinct call: `name`, `call`, `dtypes`, and a table per argument."""
    entries: dict[tuple[str, ...], str] = {}
    for operator, args, kwargs in calls:
        lines = [*_arguments(args, kwargs)]
        entries.setdefault((operator, *lines), operator)
    parts = ["# Recorded from a program; every tensor is described, none is stored."]
    for number, (operator, *lines) in enumerate(entries):
        dtypes = sorted({line.split('"')[1] for line in lines if line.startswith("dtype = ")})
        parts += [
            "",
            "[[case]]",
            f"name = {json.dumps(f'{operator}_{number}')}",
            f"call = {json.dumps(operator)}",
            f"dtypes = {json.dumps(dtypes)}",
            *lines,
        ]
    return "\n".join(parts) + "\n"


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    named = [(str(k), value) for k, value in enumerate(args)]
    for name, value in (*named, *kwargs.items()):
        yield "[[case.arguments]]"
        yield f"name = {json.dumps(name)}"
        if isinstance(value, torch.Tensor):
            yield from _tensor(value)
        elif isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value):
            shapes = [list(v.shape) for v in value if isinstance(v, torch.Tensor)]
            dtype = next(v.dtype for v in value if isinstance(v, torch.Tensor))
            yield f"shapes = {json.dumps(shapes)}"
            yield f'dtype = "{_name(dtype)}"'
        else:
            yield f"value = {_plain(value)}"


def _tensor(value: torch.Tensor) -> Iterator[str]:
    yield f"shape = {json.dumps(list(value.shape))}"
    if value.layout == torch.strided and not value.is_contiguous():
        yield f"stride = {json.dumps(list(value.stride()))}"
    yield f'dtype = "{_name(value.dtype)}"'
    yield f"generator = {json.dumps(_generator(value))}"
    if value.requires_grad:
        yield "grad = true"


def _generator(value: torch.Tensor) -> str:
    """The generator whose values are of the captured kind."""
    if value.dtype == torch.bool:
        return "mask"
    if value.is_floating_point() or value.is_complex():
        return "randn"
    if not value.numel():
        return "randint(0,1)"
    return f"randint({int(value.min())},{int(value.max()) + 1})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_plain, value))}]"
    return json.dumps(str(value))
