"""PyTorch's profiler: ranges and memory that it records, and hooks into what it reports."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import DeviceType

Restore = Callable[[], None]
DEVICE_ROW = DeviceType.PrivateUse1


def profiled_range(
    name: str, inputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]
) -> AbstractContextManager[Any]:
    """A range of the profiler that carries the shapes of `inputs`, and arguments for the trace."""
    return _RecordFunctionFast(name, list(inputs), dict(arguments))


def profiling() -> bool:
    """Whether a profiler is recording in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def report_memory(address: int, nbytes: int, device: torch.device) -> None:
    """Tell a profiler that records memory of `nbytes` allocated at `address`; freed if negative."""
    enabled, report = _memory_functions()
    if report is not None and enabled():
        number = torch._C._autograd.DeviceType.__members__[device.type.upper()].value
        report(address, nbytes, 0, 0, number | (device.index or 0) << 8)


@functools.cache
def _memory_functions() -> tuple[Any, Any]:
    """c10's own functions; none in a build of PyTorch whose compiler names them otherwise."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        enabled = library._ZN3c1022memoryProfilingEnabledEv
        report = library._ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
    except AttributeError:
        return None, None
    enabled.restype = ctypes.c_bool
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    report.argtypes, report.restype = [pointer, ctypes.c_long, size, size, ctypes.c_uint16], None
    return enabled, report


def hook_profiler(
    device_of: Callable[[str | None], str | None],
    on_events: Callable[[list[Any], str | None], None],
    on_trace: Callable[[str], None],
) -> Restore:
    """Change what profilers report from now on, until the returned function is called.

    `device_of` maps the kind of device that a program asks for, `on_events` changes the events of a
    profile, and `on_trace` the file of a chrome trace.
    """
    with contextlib.suppress(ImportError):  # not in every release
        # `record_function` imports this module when it is first entered. A profile with stacks that
        # is recording by then reads the module's code object after it is freed.
        importlib.import_module("torch.profiler._cupti_monitor")
    begin, parse, export = (
        profile.__init__,
        profile._parse_kineto_results,
        profile.export_chrome_trace,
    )

    @functools.wraps(begin)
    def changed_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) < 2:
            kwargs["use_device"] = device_of(kwargs.get("use_device"))
        begin(self, *args, **kwargs)

    @functools.wraps(parse)
    def changed_parse(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = parse(self, *args, **kwargs)
        on_events(events, self.use_device)
        return events

    @functools.wraps(export)
    def changed_export(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        result = export(self, path, *args, **kwargs)
        on_trace(path)
        return result

    methods = {
        "__init__": (begin, changed_begin),
        "_parse_kineto_results": (parse, changed_parse),
        "export_chrome_trace": (export, changed_export),
    }
    for name, (_, changed) in methods.items():
        setattr(profile, name, changed)

    def restore() -> None:
        for name, (before, _) in methods.items():
            setattr(profile, name, before)

    return restore
