"""Finding the device of this machine and letting CUDA's names mean it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.config import SwitchSettings
from dicp.errors import DicpWarning

PLUGINS = ("torch_npu", "torch_mlu", "torch_br", "torch_musa", "torch_dipu")
"""Packages of vendors that register a device with PyTorch, in the order in which they are tried."""


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
    print(found.line(), flush=True)
    return found


def _found(settings: SwitchSettings) -> Switched:
    plugin = _plugin(settings.device)
    if plugin is not None:
        module = importlib.import_module(plugin)
        return Switched(plugin, _arch(plugin), str(getattr(module, "__version__", "")))
    if torch.cuda.is_available():
        return Switched("torch", torch.cuda.get_device_name(), torch.__version__)
    if settings.disabled:
        return Switched("torch", platform.machine(), torch.__version__)
    try:
        device = importlib.import_module("dicp.device")
    except Exception as error:
        message = f"ditorch found no device, the CPU stays: {error}"
        warnings.warn(DicpWarning(message), stacklevel=4)
        return Switched("torch", platform.machine(), torch.__version__)
    undo = [device.mock.undo] if device.mock is not None else []
    return Switched("torch_dipu", device.dipu.device.__vendor__, torch.__version__, undo)


def _plugin(wanted: str) -> str | None:
    """The installed vendor plugin, which is not the project's own alias package."""
    for name in PLUGINS:
        if wanted and wanted not in name:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        if name == "torch_dipu" and _is_alias():
            continue
        return name
    return None


def _is_alias() -> bool:
    """Whether `torch_dipu` is the project's own package; it is found without importing it."""
    spec = importlib.util.find_spec("torch_dipu")
    own = importlib.util.find_spec("dicp")
    if spec is None or own is None or spec.origin is None or own.origin is None:
        return False
    return os.path.dirname(os.path.dirname(spec.origin)) == os.path.dirname(
        os.path.dirname(own.origin)
    )


def _arch(plugin: str) -> str:
    return plugin.removeprefix("torch_")


def _compile_outermost() -> Callable[[], None]:
    """Let the call of a module that no other module's call encloses run compiled."""
    call = torch.nn.Module.__call__
    inside: list[bool] = []
    compiled: dict[int, Any] = {}

    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside or torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        if id(self) not in compiled:
            compiled[id(self)] = (self, torch.compile(self.forward, backend="dicp"))
        inside.append(True)
        try:
            return compiled[id(self)][1](*args, **kwargs)
        finally:
            inside.pop()

    torch.nn.Module.__call__ = run  # type: ignore[method-assign]

    def undo() -> None:
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]

    return undo
