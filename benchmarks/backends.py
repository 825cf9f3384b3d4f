"""The backends under comparison: `eager`, any backend of `torch.compile`, options after a colon."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

EAGER = "eager"
BASELINE = "inductor"
FRONT_END = "aot_eager"
"""Dynamo and AOTAutograd alone: the time that every backend spends before its own."""

# Backends that register themselves only when a module of theirs is imported, and the options
# without which they compute in another precision than asked.
MODULES = {"openvino": "openvino.torch"}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "openvino": {"config": {"INFERENCE_PRECISION_HINT": "f32"}, "model_caching": False}
}


@dataclass(frozen=True)
class Contestant:
    """A backend and its options, written `name` or `name:option=value,option=value`."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile` with static shapes; the function itself for eager."""
        if self.name == EAGER:
            return fn
        if self.name in MODULES:
            importlib.import_module(MODULES[self.name])
        options = dict(self.options) or None
        return torch.compile(fn, backend=self.name, dynamic=False, options=options)


def parse(label: str) -> Contestant:
    """Read `cpugraph` or `cpugraph:freeze=true`; values are Python literals, true and false."""
    name, _, text = label.partition(":")
    options = dict(DEFAULTS.get(name, {}))
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"backend {label!r}: expected option=value, got {item!r}")
        options[key.strip()] = _literal(value.strip())
    return Contestant(label, name, options)


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
