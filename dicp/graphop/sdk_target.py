"""What targets share that compile graphs with a vendor's SDK, or for a simulator of it."""

from __future__ import annotations

import abc
import shlex
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from torch import fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.errors import SimulatorForbiddenError, ToolchainError
from dicp.graphop.sdk_toolchain import SdkToolchain
from dicp.graphop.simulator import Headers, SimulatorBase
from dicp.graphop.target import GraphTarget
from dicp.target import Check, tensors_of
from dicp.torch_private import HOST

HOST_TENSORS = "a tensor of the host, where there is a device; runs_on='device' has it copied"


class SdkDriver(Protocol):
    """The driver library, which the simulator's library may be part of."""

    @property
    def simulator(self) -> SimulatorBase[Any] | None: ...


Toolchain = TypeVar("Toolchain", bound=SdkToolchain)
Driver = TypeVar("Driver", bound=SdkDriver)


class SdkTarget(GraphTarget, Generic[Toolchain, Driver]):
    """A target whose graphs are C++ sources that a driver library builds and runs."""

    sdk: str
    """The SDK's name."""

    def __init__(self) -> None:
        self._drivers: dict[str, Driver] = {}
        self._headers = Headers(self.name)

    @abc.abstractmethod
    def find_toolchain(self, config: Config) -> Toolchain:
        """The compiler and the SDK that `config` allows.

        Raises ToolchainError, or SimulatorForbiddenError where `runs_on` is "device" and no SDK is
        installed.
        """

    @abc.abstractmethod
    def open_driver(self, toolchain: Toolchain, cache: Cache) -> Driver:
        """The driver, loaded in this process."""

    @abc.abstractmethod
    def sdk_checks(self, toolchain: Toolchain, config: Config) -> list[Check]:
        """What `doctor` says of an installed SDK and its devices; empty where none is installed."""

    def driver(self, toolchain: Toolchain, cache: Cache) -> Driver:
        """The driver, loaded once for each toolchain."""
        if toolchain.identity not in self._drivers:
            self._drivers[toolchain.identity] = self.open_driver(toolchain, cache)
        return self._drivers[toolchain.identity]

    def refuses(self, node: fx.Node, config: Config) -> str:
        if config.runs_on == "device" or self.simulated(config):
            return ""
        tensors = tensors_of(node)
        on_host = bool(tensors) and all(tensor.device.type == HOST for tensor in tensors)
        return HOST_TENSORS if on_host else ""

    def simulated(self, config: Config) -> bool:
        return self.find_toolchain(config).simulated

    def simulated_counts(self) -> Mapping[str, int]:
        """What the simulator has run in this process: launches, operators, transposes."""
        return next((d.simulator.counts for d in self._drivers.values() if d.simulator), {})

    def doctor(self, config: Config) -> list[Check]:
        """One line per part; what is missing fails only where an SDK is installed or asked for."""
        try:
            toolchain = self.find_toolchain(config)
        except (ToolchainError, SimulatorForbiddenError) as error:
            return [Check("toolchain", False, str(error), getattr(error, "fix", ""))]
        compiler = f"{shlex.join(toolchain.compiler)}: {toolchain.version}"
        simulator = [Check(self.sdk, True, "none"), Check("simulator", True, "graphs run in it")]
        return [Check("compiler", True, compiler),
                *(self.sdk_checks(toolchain, config) or simulator)]  # fmt: skip
