"""What the eager device and its switch read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dicp.config.kinds import BOOLEAN, COUNT, INDICES, TEXT, Invalid, Kind, choice
from dicp.config.table import Option, options_of, read, setting

__all__ = ["DEVICE_VARIABLES", "SWITCH_VARIABLES", "DeviceSettings", "SwitchSettings", "dump_level"]

_ALLOCATOR = ("max_split_size_mb", "garbage_collection_threshold")


def _parse_allocator(text: Any) -> dict[str, float]:
    """`max_split_size_mb:128,garbage_collection_threshold:0.8` as numbers."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise Invalid from None
    if not found.keys() <= set(_ALLOCATOR):
        raise Invalid
    return found


ALLOCATOR = Kind(
    "name:number,...",
    f"entries name:number separated by commas, of {', '.join(_ALLOCATOR)}",
    "Correct or drop the entry.",
    _parse_allocator,
)


@dataclass(frozen=True)
class DeviceSettings:
    """What the eager device reads from the environment, once, when it is registered."""

    vendor: str = setting(
        TEXT,
        "DITORCH_DEVICE DIPU_DEVICE",
        "the vendor's runtime; empty, dipu or simulated: the simulated chip",
        default="",
    )
    simulated: int = setting(
        COUNT, "DIPU_SIMULATED_DEVICES", "how many devices the simulated chip has", default=1
    )
    visible: tuple[int, ...] | None = setting(
        INDICES, "DIPU_VISIBLE_DEVICES", "the devices in use, in order; unset: all", default=None
    )
    mock: bool = setting(
        BOOLEAN,
        "DIPU_MOCK_CUDA",
        "the names of the device that it stands in for mean this one",
        default=True,
    )
    show_as_mocked: bool = setting(
        BOOLEAN,
        "DIPU_PYTHON_DEVICE_AS_CUDA",
        "tensors say that they are on the device that this one stands in for",
        default=True,
    )
    show_switched: bool = setting(
        BOOLEAN,
        "DITORCH_SHOW_DEVICE_AS_CUDA",
        "the same under ditorch's name; both must be on",
        default=True,
    )
    library: str = setting(
        TEXT,
        "DIPU_WITH_DIOPI_LIBRARY",
        "DISABLE: the vendor's operator library is not loaded",
        default="",
    )
    fallback: str = setting(
        TEXT,
        "DIPU_FORCE_FALLBACK_OPS_LIST",
        "operators that run on the CPU: regular expressions separated by commas",
        default="",
    )
    kept: str = setting(
        TEXT,
        "DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS",
        "operators that the target does not compile: PyTorch decomposes them, or the CPU runs them",
        default="",
    )
    compared: str = setting(
        TEXT,
        "DIPU_AUTOCOMPARE_OPS_LIST",
        "operators whose results are compared with the CPU's: patterns as above",
        default="",
    )
    dumped: str = setting(
        TEXT,
        "DIPU_DUMP_OP_ARGS",
        "what is printed of each call: 1 names, 2 arguments too, 3 values too; if it is set at the "
        "start, it is read at every call",
        default="",
    )
    log_fallback: bool = setting(
        BOOLEAN, "DIPU_LOG_FALLBACK_INFO", "log operators that run on the CPU", default=False
    )
    synchronous: bool = setting(
        BOOLEAN, "DIPU_SYNC_EXEC_MODE", "wait for the device after every operator", default=False
    )
    memory_check: bool = setting(
        BOOLEAN, "DIPU_MEM_CHECK", "report blocks of memory that are never freed", default=False
    )
    backtraces: bool = setting(
        BOOLEAN, "DIPU_MEM_CHECK_ENABLE_BACKTRACE", "with the place of each", default=False
    )
    max_blocks: int = setting(
        COUNT, "DIPU_MEM_CHECK_MAX_BLOCK", "how many blocks are reported", default=10000
    )
    log_interval: int = setting(
        COUNT, "DIPU_MEM_CHECK_LOG_INTERVAL", "allocations between two reports", default=1000
    )
    algorithm: str = setting(
        choice("BF", "BS", "RAW", "TORCH"),
        "DIPU_DEVICE_MEMCACHING_ALGORITHM",
        "the allocator: best fit, size buckets, none, or as PyTorch's",
        default="BF",
    )
    host_algorithm: str = setting(
        choice("BF", "BS", "RAW", "TORCH"),
        "DIPU_HOST_MEMCACHING_ALGORITHM",
        "the allocator of pinned memory, as above",
        default="BF",
    )
    allocator: Mapping[str, float] = setting(
        ALLOCATOR,
        "DIPU_TORCH_ALLOCATOR_CONF",
        "limits of the allocator that is as PyTorch's",
        factory=dict,
    )

    profiled: bool = setting(
        BOOLEAN,
        "FORCE_USE_DIPU_PROFILER",
        "profiles that name no device have the rows of this one, too",
        default=False,
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DeviceSettings:
        """The settings of this process. Raises ConfigValueError."""
        return cls(**_given(DEVICE_VARIABLES, environ))

    @property
    def shows_as_mocked(self) -> bool:
        """Whether tensors say that they are on the device that this one stands in for."""
        return self.show_as_mocked and self.show_switched

    @property
    def uses_library(self) -> bool:
        """Whether the vendor's operator library is loaded."""
        return self.library.upper() != "DISABLE"

    @property
    def dumps(self) -> bool:
        """Whether DIPU_DUMP_OP_ARGS is set, so that it has to be read at every call."""
        return bool(self.dumped)

    @property
    def max_split_mb(self) -> int:
        """The largest block that may be split, in MiB; 0: any."""
        return int(self.allocator.get("max_split_size_mb", 0))

    @property
    def collect_above(self) -> float:
        """The share of memory in use from which unused blocks are freed; 0: never."""
        return float(self.allocator.get("garbage_collection_threshold", 0.0))


def dump_level() -> int:
    """DIPU_DUMP_OP_ARGS, which is read at every call of an operator."""
    text = os.environ.get("DIPU_DUMP_OP_ARGS", "").strip()
    return int(_LEVEL.parse(text, "environment variable DIPU_DUMP_OP_ARGS")) if text else 0


_LEVEL = Option("level", COUNT, (), 0, "", changes_code=False)


@dataclass(frozen=True)
class SwitchSettings:
    """What `import ditorch` reads from the environment."""

    device: str = setting(
        TEXT,
        "DITORCH_DEVICE DIPU_DEVICE",
        "the plugin, vendor or kind of device to switch to; empty: the first that is there",
        default="",
    )
    disabled: bool = setting(BOOLEAN, "DITORCH_DISABLE_MOCK", "replace nothing", default=False)
    compiled: bool = setting(
        BOOLEAN, "DITORCH_COMPILE", "modules run compiled by backend='dicp'", default=False
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SwitchSettings:
        """The settings of this process. Raises ConfigValueError."""
        return cls(**_given(SWITCH_VARIABLES, environ))


DEVICE_VARIABLES = options_of(DeviceSettings)
SWITCH_VARIABLES = options_of(SwitchSettings)


def _given(options: tuple[Option, ...], environ: Mapping[str, str] | None) -> dict[str, Any]:
    given = os.environ if environ is None else environ
    return read(options, {name: text.strip() for name, text in given.items()})
