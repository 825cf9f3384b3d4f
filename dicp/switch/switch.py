"""Finding the device of this machine and letting CUDA's names mean it."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from dicp.config import SwitchSettings
from dicp.errors import DicpWarning
from dicp.module_calls import around_outermost_calls
from dicp.torch_private import privateuse1_name

PLUGINS = "torch.backends"
"""The entry-point group in which vendors register what PyTorch loads when it is imported."""


@dataclass
class Switched:
    """The device that was found, and how to undo what was replaced."""

    framework: str
    arch: str
    version: str
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        """Put back everything that the switch replaced."""
        while self._undo:
            self._undo.pop()()

    def line(self) -> str:
        return f"ditorch: {self.arch} {self.framework}:{self.version} pid: {os.getpid()}"


def switch(settings: SwitchSettings) -> Switched:
    """Find the device, replace names unless that is switched off, and print one line."""
    found = _found(settings)
    if settings.compiled:
        found._undo.append(_compile_outermost())
    sys.stdout.write(f"{found.line()}\n")
    sys.stdout.flush()
    return found


def _found(settings: SwitchSettings) -> Switched:
    plugin = _plugin(settings.device)
    if plugin is not None:
        module = importlib.import_module(plugin.module)
        version = str(getattr(module, "__version__", ""))
        message = f"ditorch found the plugin {plugin.name}; use its own way of replacing names"
        warnings.warn(DicpWarning(message), stacklevel=4)
        return Switched(plugin.module, privateuse1_name(), version)
    if torch.cuda.is_available():
        return Switched("torch", torch.cuda.get_device_name(), torch.__version__)
    if settings.disabled:
        return Switched("torch", platform.machine(), torch.__version__)
    try:
        device = importlib.import_module("dicp.device.active")
    except Exception as error:
        message = f"ditorch found no device, the CPU stays: {error}"
        warnings.warn(DicpWarning(message), stacklevel=4)
        return Switched("torch", platform.machine(), torch.__version__)
    undo = [device.mock.undo] if device.mock is not None else []
    return Switched("torch_dipu", device.dipu.device.__vendor__, torch.__version__, undo)


def _plugin(wanted: str) -> EntryPoint | None:
    """The vendor's plugin of PyTorch called `wanted`, else the first; not the project's own."""
    points = sorted(entry_points(group=PLUGINS), key=lambda point: point.name)
    found = [point for point in points if not point.value.startswith("dicp.")]
    named = [point for point in found if wanted in (point.name, point.module)]
    return next(iter(named if wanted else found), None)


def _compile_outermost() -> Callable[[], None]:
    """Let the call of a module that no other module's call encloses run compiled."""
    compiled: dict[int, Any] = {}

    def run(module: torch.nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in compiled:
            compiled[id(module)] = (module, torch.compile(module.forward, backend="dicp"))
        return compiled[id(module)][1](*args, **kwargs)

    return around_outermost_calls(run)
