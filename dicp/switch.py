"""`import ditorch`: a CUDA program runs on the device of this machine, unchanged.

The device is the one of DITORCH_DEVICE or DIPU_DEVICE, else that of an installed plugin of PyTorch,
else CUDA, else the project's eager device. Where CUDA is real, or DITORCH_DISABLE_MOCK=1, nothing
is replaced. `undo` puts everything back.

A module and no package: PyTorch imports the packages of a project whose logs TORCH_LOGS asks for.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch

from dicp.config import SwitchSettings
from dicp.discovery import discover
from dicp.errors import DicpWarning
from dicp.module_calls import around_outermost_calls
from dicp.torch_private import privateuse1_name

__all__ = ["arch", "framework", "switched", "undo"]

HOST, CUDA = "cpu", "cuda"
PLUGINS = "torch.backends"
"""The entry-point group in which vendors register what PyTorch loads when it is imported."""
PLUGIN_FILE = "pytorch_plugin.json"
"""In a target's folder: the "module" that adds the vendor's device to PyTorch, and the module whose
import lets unchanged programs run on it ("migration"). Where PyTorch has the device: no file."""


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
    for plugin in _plugins(settings.device):
        switched = _to_plugin(plugin, settings)
        if switched is not None:
            return switched
    if settings.device == HOST:
        return Switched("torch", platform.machine(), torch.__version__)
    if settings.device in ("", CUDA) and torch.cuda.is_available():
        return Switched("torch", torch.cuda.get_device_name(), torch.__version__)
    if settings.disabled:
        return Switched("torch", platform.machine(), torch.__version__)
    try:
        device = importlib.import_module("dicp.device.active")
    except Exception as error:
        _warn(f"ditorch found no device, the CPU stays: {error}")
        return Switched("torch", platform.machine(), torch.__version__)
    undo = [device.mock.undo] if device.mock is not None else []
    return Switched("torch_dipu", device.dipu.device.__vendor__, torch.__version__, undo)


@dataclass(frozen=True)
class Plugin:
    """A vendor's package that adds its device to PyTorch; `migration` as in PLUGIN_FILE."""

    name: str
    module: str
    migration: str = ""


def _plugins(wanted: str) -> list[Plugin]:
    """The installed plugins, or those called `wanted`; not the project's own."""
    known: dict[str, str] = {}
    for target in discover().values():
        known |= _plugin_of(target)
    points = sorted(entry_points(group=PLUGINS), key=lambda point: point.name)
    found = {
        point.module: Plugin(point.name, point.module, known.get(point.module, ""))
        for point in points
        if not point.value.startswith("dicp.")
    }
    for module, migration in known.items():
        if module not in found and importlib.util.find_spec(module) is not None:
            found[module] = Plugin(module, module, migration)
    return [p for p in found.values() if not wanted or wanted in (p.name, p.module)]


def _plugin_of(target: EntryPoint) -> dict[str, str]:
    """The plugin's module and its migration from the target's PLUGIN_FILE, if it has one.

    Nothing of the target is imported: its folder is found from its outermost package.
    """
    root, *inner = target.module.split(".")
    try:
        spec = importlib.util.find_spec(root)
        for folder in (spec and spec.submodule_search_locations) or ():
            module = Path(folder, *inner)
            file = (module if module.is_dir() else module.parent) / PLUGIN_FILE
            if file.exists():
                stated = json.loads(file.read_text())
                return {stated["module"]: stated.get("migration", "")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        _warn(f"ditorch cannot read {PLUGIN_FILE} of the target {target.name}: {reason}")
    return {}


def _to_plugin(plugin: Plugin, settings: SwitchSettings) -> Switched | None:
    """The plugin's device with CUDA's names, or None for a plugin that cannot be imported."""
    try:
        module = importlib.import_module(plugin.module)
    except Exception as error:  # its driver is missing: each plugin raises its own
        _warn(f"ditorch cannot use the plugin {plugin.name}: {type(error).__name__}: {error}")
        return None
    version = str(getattr(module, "__version__", ""))
    switched = Switched(plugin.module, privateuse1_name(), version)
    if settings.disabled or torch.cuda.is_available():
        return switched
    if not plugin.migration:
        _warn(f"ditorch found the plugin {plugin.name}; use its own way of replacing names")
        return switched
    switched._undo.append(_restorer())
    importlib.import_module(plugin.migration)
    return switched


def _restorer() -> Callable[[], None]:
    """Puts the names of PyTorch back that are replaced from now on."""
    owners = [torch, torch.Tensor, torch.nn.Module, torch.cuda, torch.amp, torch.random]
    owners += [torch.distributed] if torch.distributed.is_available() else []
    before = [(owner, dict(vars(owner))) for owner in owners]

    def restore() -> None:
        for owner, names in before:
            for name, value in names.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
            for name in set(vars(owner)) - set(names):
                if isinstance(owner, type):  # what it inherits is meant again
                    delattr(owner, name)

    return restore


def _warn(message: str) -> None:
    warnings.warn(DicpWarning(message), stacklevel=5)


def _compile_outermost() -> Callable[[], None]:
    """Let the call of a module that no other module's call encloses run compiled."""
    compiled: dict[int, Any] = {}

    def run(module: torch.nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in compiled:
            compiled[id(module)] = (module, torch.compile(module.forward, backend="dicp"))
        return compiled[id(module)][1](*args, **kwargs)

    return around_outermost_calls(run)


switched: Switched = switch(SwitchSettings.from_env())
framework = switched.framework
arch = switched.arch
undo = switched.undo
