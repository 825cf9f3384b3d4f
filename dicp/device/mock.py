"""CUDA's names mean the device: programs written for CUDA run without a change.

Factories and conversions that are asked for a `cuda` device reach kernels of PyTorch's CUDA key,
which a build without CUDA leaves empty; there the native part makes tensors of this device. What
is left is replaced by name: the functions of `torch.cuda`, and the attributes and methods of
tensors that name the device. `Mock.undo` puts all of it back.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dicp.device.hosted import DEVICE_TYPE
from dicp.device.module import DipuModule, as_device
from dicp.errors import DicpWarning
from dicp.torch_private import (
    AfterDynamo,
    FakeTensor,
    is_tracing,
    methods_in_graphs,
    traced_device_attributes,
    true_device,
)

NAME = "cuda"
COMMUNICATION = "dicl"
_MODULES = ("", ".random", ".memory", ".streams")
_OWN = (
    "device", "device_of", "Stream", "Event", "_initialized", "_lazy_init", "_is_in_bad_fork",
    "_sleep",
)  # fmt: skip
_RANGES = ("range_push", "range_pop", "range_start", "range_end", "mark")
_TYPED = (
    "is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype",
)  # fmt: skip
"""Functions of `torch` whose first argument is a device type."""

_MISSING = object()


def as_shown(device: Any) -> torch.device:
    """The device under the name that programs see."""
    return torch.device(NAME, device.index) if device.type == DEVICE_TYPE else device


def _shown_device(tensor: torch.Tensor) -> torch.device:
    """The device under the name that programs see; fake tensors are made on the real one."""
    place = true_device(tensor)
    return place if is_tracing() else as_shown(place)


def renamed_device(device: Any) -> Any:
    """A device given by a program, the other name replaced; other values as they are."""
    if isinstance(device, str) and (device == NAME or device.startswith(f"{NAME}:")):
        return DEVICE_TYPE + device.removeprefix(NAME)
    if isinstance(device, torch.device) and device.type == NAME:
        return as_device(device)
    return device


class Mock:
    """Replaces names, and remembers what was there."""

    def __init__(self, native: Any, module: DipuModule, shown: bool) -> None:
        self.native, self.module, self.shown = native, module, shown
        self._before: list[tuple[Any, str, Any]] = []

    def apply(self) -> None:
        self.native.mock(True)
        self.module.answers_to[NAME] = DEVICE_TYPE
        self._functions()
        self._tensors()
        self._autocast()
        self._storages()
        if torch.distributed.is_available():
            self._distributed()

    def undo(self) -> None:
        """Put back everything that `apply` replaced."""
        self.native.mock(False)
        self._waiting.cancel()
        self.module.answers_to.clear()
        for owner, name, value in reversed(self._before):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._before.clear()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = owner.__dict__.get(name, _MISSING)
        self._before.append((owner, name, before))
        setattr(owner, name, value)

    def _functions(self) -> None:
        names = [n for n in dir(DipuModule) if not n.startswith("_")]
        for part in _MODULES:
            owner = functools.reduce(getattr, filter(None, part.split(".")), torch.cuda)
            assert isinstance(owner, ModuleType)
            for name in (*names, *_OWN):
                if name in owner.__dict__:
                    self._set(owner, name, getattr(self.module, name))
        self._set(torch.cuda, "default_generators", tuple(
            self.module.generator(index) for index in range(self.module.device_count())
        ))  # fmt: skip
        self._set(torch.cuda, "is_current_stream_capturing", lambda: False)
        for name in _RANGES:  # there is no such profiler to tell
            self._set(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)

    def _tensors(self) -> None:
        meant = renamed_device
        to = torch.Tensor.to

        def convert(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args:
                args = (meant(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = meant(kwargs["device"])
            return to(self, *args, **kwargs)

        def move(
            self: torch.Tensor,
            device: Any = None,
            non_blocking: bool = False,
            memory_format: torch.memory_format = torch.preserve_format,
        ) -> torch.Tensor:
            place = as_device(meant(device))
            # Dynamo traces a call of the method `to`, not one of the function that it replaces.
            return self.to(place, non_blocking=non_blocking, memory_format=memory_format)

        def on_device(place: torch.device) -> bool:
            return place.type == DEVICE_TYPE

        def is_moved(self: torch.Tensor) -> bool:
            return on_device(true_device(self))

        def with_meant(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(self: torch.Tensor, device: Any = None) -> Any:
                return method(self) if device is None else method(self, meant(device))

            return call

        self._set(torch.Tensor, "to", functools.wraps(to)(convert))
        for name in ("pin_memory", "is_pinned"):
            self._set(torch.Tensor, name, with_meant(getattr(torch.Tensor, name)))
        self._set(torch.Tensor, NAME, move)
        self._set(torch.Tensor, f"is_{NAME}", property(is_moved))
        if self.shown:
            self._set(torch.Tensor, "device", property(_shown_device))
        as_seen = as_shown if self.shown else lambda place: place

        def teach_dynamo() -> None:
            traced, attributes = traced_device_attributes(as_seen, on_device)
            for name, method in attributes.items():
                self._set(traced, name, method)
            self._set(*methods_in_graphs(to))

        self._waiting = AfterDynamo(teach_dynamo)
        self._set(torch, "Generator", _generator_class(torch.Generator))
        make = FakeTensor.__new__

        def fake(cls: Any, mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            return make(cls, mode, elem, meant(device), *args, **kwargs)

        self._set(FakeTensor, "__new__", staticmethod(fake))

    def _autocast(self) -> None:
        autocast = torch.amp.autocast_mode.autocast
        start = autocast.__init__

        @functools.wraps(start)
        def begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            start(self, DEVICE_TYPE if device_type == NAME else device_type, *args, **kwargs)

        self._set(autocast, "__init__", begin)
        for name in _TYPED:
            self._set(torch, name, _typed(getattr(torch, name)))
        for owner in (torch.amp.autocast_mode, torch.amp):
            self._set(owner, "is_autocast_available", _typed(owner.is_autocast_available))

    def _storages(self) -> None:
        start = torch.UntypedStorage.to

        def convert(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
            return start(self, device=renamed_device(device), non_blocking=non_blocking)

        self._set(torch.UntypedStorage, "to", convert)

    def _distributed(self) -> None:
        import torch.distributed as distributed

        for name in ("init_process_group", "new_group"):
            self._set(distributed, name, _with_backend(getattr(distributed, name)))
            owner = distributed.distributed_c10d
            self._set(owner, name, getattr(distributed, name))
        self._set(distributed, "is_nccl_available", lambda: True)


def _generator_class(real: type) -> type:
    """`torch.Generator` for any name of the device; instances are PyTorch's own."""

    class Meta(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

        def __call__(cls, device: Any = "cpu") -> Any:
            return real(device=renamed_device(device))

    return Meta("Generator", (), {"__doc__": real.__doc__})


def _typed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] == NAME:
            args = (DEVICE_TYPE, *args[1:])
        elif not args and "device_type" not in kwargs:
            args = (DEVICE_TYPE,)
        if kwargs.get("device_type") == NAME:
            kwargs["device_type"] = DEVICE_TYPE
        return function(*args, **kwargs)

    return call


def _with_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    """`nccl` means the device's own backend; a device to bind to loses its other name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (_backend(args[0]), *args[1:])
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = _backend(kwargs["backend"])
        if "device_id" in kwargs:
            kwargs["device_id"] = None
        return function(*args, **kwargs)

    return call


def _backend(name: str) -> str:
    parts = [part.partition(":") for part in name.lower().split(",")]
    if len(parts) == 1 and not parts[0][2]:
        return COMMUNICATION if name.lower() == "nccl" else name
    renamed = {NAME: DEVICE_TYPE}
    return ",".join(
        f"{renamed.get(device, device)}:{COMMUNICATION if backend == 'nccl' else backend}"
        for device, _, backend in parts
    )


def mock_if_wanted(native: Any, module: DipuModule, wanted: bool, shown: bool) -> Mock | None:
    """Apply the mock unless it is switched off or the machine has what it would replace."""
    if not wanted or torch.cuda.is_available():
        return None
    mock = Mock(native, module, shown)
    mock.apply()
    if shown:
        message = (
            "tensors of the device show their device as 'cuda'; set "
            "DIPU_PYTHON_DEVICE_AS_CUDA=false to see 'dipu'"
        )
        warnings.warn(DicpWarning(message), stacklevel=2)
    return mock
