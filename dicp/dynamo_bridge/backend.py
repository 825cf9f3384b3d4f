"""What `torch.compile(backend=...)` calls: one backend per target, and one that picks the target.

The names `<target>graph` derive from the installed targets, so that a new vendor needs no line
here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dicp.config import Config, asked
from dicp.discovery import SUFFIX, discover
from dicp.dynamo_bridge.compile_fx import compile_fx
from dicp.dynamo_bridge.fuse.families import fusion_problems
from dicp.dynamo_bridge.observe import GraphReport, breaks_text
from dicp.dynamo_bridge.recording import BREAKS, breaks_record, write_record
from dicp.dynamo_bridge.thresholds import KEPT_PROGRAMS, KEPT_REPORTS
from dicp.errors import (
    DeviceMovedError,
    DumpFolderError,
    FallbackWarning,
    InvalidTargetError,
    TargetNotFoundError,
)
from dicp.target import Target, find_target
from dicp.torch_private import (
    HOST,
    GraphBreaks,
    actual_device_type,
    register_repeatedly,
    trace_recurrent_modules,
)


class Backend:
    """A `torch.compile` backend for one target, with default options.

    `reports` holds one GraphReport per graph compiled through this object, newest last; only the
    newest KEPT_PROGRAMS can show their kernels' programs.
    """

    def __init__(self, target: str | None = None, **options: Any) -> None:
        self.target_name = target
        self.options = options
        self.reports: deque[GraphReport] = deque(maxlen=KEPT_REPORTS)
        self.__name__ = f"{target}{SUFFIX}" if target else "dicp"
        self.before_tracing(options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """The backend itself: copies of a compiled module share it, with its reports."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled compiled module names its backend; reports stay in their process."""
        if _backends.get(self.target_name) is self:
            return _backend, (self.target_name,)
        return partial(Backend, self.target_name, **self.options), ()

    def before_tracing(self, options: Mapping[str, Any]) -> None:
        """Apply the options that Dynamo reads before it traces."""
        if asked("rnn", options):
            trace_recurrent_modules()
        if asked("timings", options):
            report_breaks_at_exit()
        folder = asked("dump", options)
        if folder is not None:
            dump_breaks_at_exit(folder)

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        given = {**self.options, **(options or {})}
        target, config = self._target_and_config(gm, example_inputs, given, mode)

        def record(report: GraphReport) -> None:
            self.reports.append(report)
            if len(self.reports) > KEPT_PROGRAMS:
                self.reports[-1 - KEPT_PROGRAMS].drop_programs()

        return compile_fx(gm, example_inputs, target, config, record)

    def _target_and_config(
        self, gm: fx.GraphModule, inputs: Sequence[Any], given: Mapping[str, Any],
        mode: str | None = None,
    ) -> tuple[Target, Config]:  # fmt: skip
        """The target for these inputs, and the settings it compiles with."""
        devices = _devices(inputs)
        name = self.target_name or asked("target", given)
        target = load_target(name) if name else target_for_devices(devices)
        config = Config.from_env(vendor=target.options).with_options(given, mode, target.options)
        # CPU inputs are allowed: the graph moves them, or operators on them run eagerly.
        if self.target_name is not None and devices - target.devices(config) - {HOST}:
            raise DeviceMovedError(target.device_type, _devices_text(gm, inputs))
        return target, config


def _devices(inputs: Sequence[Any]) -> set[str]:
    """The types of devices that tensors are on. A zero-dimensional CPU tensor combines with
    tensors on any device."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    types = {actual_device_type(x.device.type) for x in tensors if x.ndim or x.device.type != HOST}
    return types - {"meta"}


def _devices_text(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The devices of the inputs, each with the names of its inputs in the graph."""
    found: dict[str, list[str]] = {}
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    for k, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            name = names[k] if k < len(names) else f"input {k}"
            found.setdefault(str(value.device), []).append(name)
    return " and ".join(f"{device} ({', '.join(found[device][:4])})" for device in sorted(found))


def target_for_devices(devices: set[str]) -> Target:
    """The target of highest priority for the inputs' device, or the CPU where there is no other.

    Skips targets that cannot be loaded, with a warning. Raises TargetNotFoundError.
    """
    wanted = next(iter(devices - {HOST}), HOST)
    found = []
    for name in sorted(discover()):
        try:
            target = load_target(name)
        except InvalidTargetError as error:
            warnings.warn(FallbackWarning(str(error)), stacklevel=2)
            continue
        if target.device_type == wanted:
            found.append(target)
    if not found:
        raise TargetNotFoundError(f"(for device {wanted})", sorted(discover()))
    return max(found, key=lambda target: target.priority)


def load_target(name: str) -> Target:
    """The target called `name`.

    Raises TargetNotFoundError, and InvalidTargetError where it asks for fusions that dicp lacks, or
    whose operators its rules lack.
    """
    target = find_target(name)
    problems = list(fusion_problems(target))
    if problems:
        raise InvalidTargetError(name, discover()[name].value, problems)
    return target


@cache
def report_breaks_at_exit() -> None:
    """Have graph breaks and skipped functions written to stderr when the process ends."""
    breaks = GraphBreaks()
    atexit.register(lambda: sys.stderr.write(breaks_text(breaks.found())))


@cache
def dump_breaks_at_exit(folder: Path) -> None:
    """Have graph breaks and skipped functions written into a dump when the process ends."""
    breaks = GraphBreaks()

    def write() -> None:
        with contextlib.suppress(OSError, DumpFolderError):  # compiling has said so
            folder.mkdir(parents=True, exist_ok=True)
            write_record(folder / BREAKS.format(pid=os.getpid()), breaks_record(breaks.found()))

    atexit.register(write)


_backends: dict[str | None, Backend] = {}
register_repeatedly(Backend)


def _backend(name: str | None) -> Backend:
    """The only backend of this name; threads that ask for it concurrently get the same object."""
    return _backends.setdefault(name, Backend(name))


def __getattr__(name: str) -> Any:
    if name == "dicp":
        return _backend(None)
    if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in discover():
        return _backend(name.removesuffix(SUFFIX))
    raise AttributeError(name)
