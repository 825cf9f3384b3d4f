"""What the eager device and its switch read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dicp.config.kinds import BOOLEAN, COUNT, Invalid, Kind, choice, parse_count
from dicp.errors import ConfigValueError

_ALGORITHMS = ("BF", "BS", "RAW", "TORCH")


@dataclass(frozen=True)
class DeviceSettings:
    """What the eager device reads from the environment, once, when it is registered.

    `fallback`, `kept` and `compared` are texts of patterns, separated by commas.
    """

    vendor: str = ""
    simulated: int = 1
    visible: tuple[int, ...] | None = None
    mock: bool = True
    show_as_mocked: bool = True
    fallback: str = ""
    kept: str = ""
    compared: str = ""
    dumps: bool = False
    """Whether DIPU_DUMP_OP_ARGS is set, so that it has to be read at every call."""
    log_fallback: bool = False
    check_device: bool = False
    synchronous: bool = False
    memory_check: bool = False
    backtraces: bool = False
    max_blocks: int = 10000
    log_interval: int = 1000
    algorithm: str = "BF"
    max_split_mb: int = 0
    collect_above: float = 0.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DeviceSettings:
        """The settings of this process. Raises ConfigValueError."""
        given = _Variables(os.environ if environ is None else environ)
        options = _allocator_options(given.text("DIPU_TORCH_ALLOCATOR_CONF"))
        visible = given.text("DIPU_VISIBLE_DEVICES")
        return cls(
            vendor=given.text("DIPU_DEVICE"),
            simulated=given.count("DIPU_SIMULATED_DEVICES", 1),
            visible=_indices("DIPU_VISIBLE_DEVICES", visible) if visible else None,
            mock=given.boolean("DIPU_MOCK_CUDA", True),
            show_as_mocked=given.boolean("DIPU_PYTHON_DEVICE_AS_CUDA", True)
            and given.boolean("DITORCH_SHOW_DEVICE_AS_CUDA", True),
            fallback=given.text("DIPU_FORCE_FALLBACK_OPS_LIST"),
            kept=given.text("DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS"),
            compared=given.text("DIPU_AUTOCOMPARE_OPS_LIST"),
            dumps=bool(given.text("DIPU_DUMP_OP_ARGS")),
            log_fallback=given.boolean("DIPU_LOG_FALLBACK_INFO", False),
            check_device=given.boolean("DIPU_CHECK_TENSOR_DEVICE", False),
            synchronous=given.boolean("DIPU_SYNC_EXEC_MODE", False),
            memory_check=given.boolean("DIPU_MEM_CHECK", False),
            backtraces=given.boolean("DIPU_MEM_CHECK_ENABLE_BACKTRACE", False),
            max_blocks=given.count("DIPU_MEM_CHECK_MAX_BLOCK", 10000),
            log_interval=given.count("DIPU_MEM_CHECK_LOG_INTERVAL", 1000),
            algorithm=given.one_of("DIPU_DEVICE_MEMCACHING_ALGORITHM", _ALGORITHMS, "BF"),
            max_split_mb=int(options.get("max_split_size_mb", 0)),
            collect_above=float(options.get("garbage_collection_threshold", 0.0)),
        )


def dump_level() -> int:
    """DIPU_DUMP_OP_ARGS, which is read at every call of an operator."""
    return _Variables(os.environ).count("DIPU_DUMP_OP_ARGS", 0)


@dataclass(frozen=True)
class SwitchSettings:
    """What `import ditorch` reads from the environment."""

    device: str = ""
    disabled: bool = False
    compiled: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SwitchSettings:
        given = _Variables(os.environ if environ is None else environ)
        return cls(
            device=given.text("DITORCH_DEVICE") or given.text("DIPU_DEVICE"),
            disabled=given.boolean("DITORCH_DISABLE_MOCK", False),
            compiled=given.boolean("DITORCH_COMPILE", False),
        )


class _Variables:
    """Typed reads of environment variables; an empty one counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def text(self, name: str) -> str:
        return self.environ.get(name, "").strip()

    def _parsed(self, name: str, kind: Kind, default: Any) -> Any:
        given = self.text(name)
        if not given:
            return default
        try:
            return kind.parse(given)
        except Invalid:
            source = f"environment variable {name}"
            raise ConfigValueError(source, given, kind.expected, kind.fix) from None

    def boolean(self, name: str, default: bool) -> bool:
        return bool(self._parsed(name, BOOLEAN, default))

    def count(self, name: str, default: int) -> int:
        return int(self._parsed(name, COUNT, default))

    def one_of(self, name: str, values: Sequence[str], default: str) -> str:
        return str(self._parsed(name, choice(*values), default))


def _indices(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_count(part.strip()) for part in text.split(","))
    except Invalid:
        source = f"environment variable {name}"
        fix = "Give indices separated by commas."
        raise ConfigValueError(source, text, "device indices such as 0,1", fix) from None


def _allocator_options(text: str) -> dict[str, float]:
    """`max_split_size_mb:128,garbage_collection_threshold:0.8` as numbers."""
    known = ("max_split_size_mb", "garbage_collection_threshold")
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        try:
            if name.strip() not in known:
                raise ValueError
            found[name.strip()] = float(value)
        except ValueError:
            expected = f"entries name:number separated by commas, of {', '.join(known)}"
            source = "environment variable DIPU_TORCH_ALLOCATOR_CONF"
            raise ConfigValueError(source, text, expected, "Correct or drop the entry.") from None
    return found
