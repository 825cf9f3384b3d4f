"""Registering the device with PyTorch, once in a process."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, Final

import torch

from dicp.config import Config, DeviceSettings
from dicp.device import build, operator_library, profiler, sync_batch_norm
from dicp.device import runtime_interface as interface
from dicp.device.composite import ForcedComposites
from dicp.device.dispatcher import Dispatcher
from dicp.device.hosted import DEVICE_TYPE
from dicp.device.module import DipuModule, device
from dicp.device.output import say
from dicp.device.patterns import Patterns
from dicp.device.tools import AutoCompare, Dump
from dicp.dynamo_bridge.cells import CELLS
from dicp.errors import DeviceRegistrationError
from dicp.torch_private import give_shapes, privateuse1_name, register_device_module

UNNAMED = "privateuseone"
LAST_DROPS: Final = 0.02
"""Seconds that other threads have at exit to drop Python objects."""
SIMULATED = "simulated"


@dataclass(frozen=True)
class Registered:
    """The device of this process."""

    module: DipuModule
    native: Any
    dispatcher: Dispatcher
    settings: DeviceSettings


def register(settings: DeviceSettings, config: Config) -> Registered:
    """Register the device as `dipu`.

    Raises DeviceRegistrationError where another plugin has taken PrivateUse1, and what loading the
    runtime raises: VendorNotFoundError, RuntimeLibraryError, ToolchainError.
    """
    taken = privateuse1_name()
    if taken != UNNAMED:
        raise DeviceRegistrationError(
            f"PrivateUse1 is named {taken!r} already and cannot be named {DEVICE_TYPE!r} as well",
            f"Import either the package that registers {taken!r} or this one, not both.",
        )
    runtime, path = _runtime(settings, config)
    addresses = interface.addresses(runtime, path)
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    native = build.load_module(config)
    algorithms = settings.algorithm, settings.host_algorithm
    limits = settings.max_split_mb << 20, settings.collect_above
    try:
        native.start(addresses, settings.visible, *algorithms, *limits)
    except ValueError as error:
        raise DeviceRegistrationError(
            f"DIPU_VISIBLE_DEVICES: {error}", f"Name devices that {path} has."
        ) from None
    dispatcher = Dispatcher(native, config, settings)
    module = DipuModule(native, dispatcher, settings)
    device.__vendor__ = settings.vendor if _is_vendor(settings.vendor) else SIMULATED
    register_device_module(DEVICE_TYPE, module)
    profiler.register(module, settings.profiled)
    native.set_handler(dispatcher)
    library = torch.library.Library("aten", "IMPL")
    sync_batch_norm.register(library)
    give_shapes(CELLS)  # PyTorch has them for LSTM with a bias alone
    if settings.uses_library:
        operator_library.load(dispatcher, device.__vendor__, library)
    _observe(dispatcher, settings)
    if settings.memory_check:
        _watch_memory(native, settings)
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        from dicp.device.distributed import register_backend  # its class needs gloo

        register_backend(native, runtime, settings.visible)
    os.register_at_fork(after_in_child=module.mark_forked)
    made = Registered(module, native, dispatcher, settings)
    native.hold((runtime, library))
    atexit.register(_at_exit, made)
    return made


def _observe(dispatcher: Dispatcher, settings: DeviceSettings) -> None:
    dispatcher.forced_changed = ForcedComposites(dispatcher).update
    dispatcher.forced_changed(dispatcher.forced)
    compared = Patterns("DIPU_AUTOCOMPARE_OPS_LIST", settings.compared)
    if compared:
        dispatcher.observers.append(AutoCompare(dispatcher, compared))
    if settings.dumps:
        dispatcher.observers.append(Dump(dispatcher, None))
    dispatcher.update_watching()
    if settings.synchronous:
        say("DIPU_SYNC_EXEC_MODE: every operator is waited for")


def _runtime(settings: DeviceSettings, config: Config) -> tuple[Any, str]:
    if _is_vendor(settings.vendor):
        return interface.load_vendor(settings.vendor)
    library = build.load_simulator(config)
    named = max(settings.visible or (), default=-1) + 1
    library.dicp_simulator_devices(max(settings.simulated, named))
    return library, "the simulated chip"


def _is_vendor(name: str) -> bool:
    return name not in ("", DEVICE_TYPE, SIMULATED)


def _watch_memory(native: Any, settings: DeviceSettings) -> None:
    def where() -> str:
        return "".join(traceback.format_stack(sys._getframe(1)))

    native.watch_memory(
        True, settings.backtraces, settings.max_blocks, settings.log_interval, where, say
    )


def _at_exit(made: Registered) -> None:
    native, settings = made.native, made.settings
    if made.module._is_in_bad_fork():
        return
    if settings.memory_check:
        _report_leaks(made)
    # A thread of autograd may still drop the Python exception of a failed backward. Once the
    # interpreter ends, waiting for its lock would end the process by std::terminate.
    time.sleep(LAST_DROPS)
    made.dispatcher.close()
    native.close()


def _report_leaks(made: Registered) -> None:
    leaks = made.module.memory_leaks()
    say(made.native.checker_line("going to destruction. "))
    for block in leaks:
        place = f", allocated at\n{block['where']}" if block["where"] else ""
        size, address, index = block["size"], block["address"], block["device"]
        line = f"block of {size} bytes at {address:#x} on {DEVICE_TYPE}:{index} is not freed"
        say(f"dipu memory checker: {line}{place}")
