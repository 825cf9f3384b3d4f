"""`torch.dipu`: the device's Python module, which follows `torch.cuda`."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from dicp.config import DeviceSettings
from dicp.device.dispatcher import Dispatcher
from dicp.device.hosted import DEVICE_TYPE
from dicp.device.tools import DumpLevel


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is: `total_memory` in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


class Stream(torch.Stream):
    """An ordered queue of a device's work; of lower `priority` number, of more urgent work."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=as_device(device), priority=priority)


class _EventType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Event)


class Event(metaclass=_EventType):
    """A point in a stream's queue, and its time: a `torch.Event` of the device.

    PyTorch measures the time between objects of exactly that class, so this one only makes them.
    """

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Any:
        if interprocess:
            raise NotImplementedError("events of the device are not shared between processes")
        return torch.Event(device=as_device(None), enable_timing=True)


def as_device(device: Any) -> torch.device:
    """A device with its index: of None the current one, of an integer that one."""
    if isinstance(device, int):
        return torch.device(DEVICE_TYPE, device)
    found = torch.device(device) if isinstance(device, str) else device
    index = None if found is None else found.index
    return torch.device(DEVICE_TYPE, torch.accelerator.current_device_index()
                        if index is None else index)  # fmt: skip


class device:
    """A context in which another device is the current one."""

    __dipu__ = DEVICE_TYPE
    __diputype__ = DEVICE_TYPE
    __vendor__ = "simulated"

    def __init__(self, place: Any) -> None:
        self.index = place if isinstance(place, int) else as_device(place).index
        self._before = -1

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


class device_of(device):
    """A context in which the device of a tensor is the current one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(max(tensor.get_device(), 0))


class DipuModule(ModuleType):
    """The functions of `torch.cuda` for this device."""

    Stream, Event, device, device_of = Stream, Event, device, device_of
    _initialized = True  # activation checkpoints save the random state of such modules alone

    def __init__(self, native: Any, dispatcher: Dispatcher, settings: DeviceSettings) -> None:
        super().__init__(f"torch.{DEVICE_TYPE}", __doc__)
        self.native, self.dispatcher, self.settings = native, dispatcher, settings
        self._forked = False
        self.answers_to: dict[str, str] = {}
        """Device types that mean this device, when programs were written for another."""

    # ---- devices --------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return bool(self.native.device_count() > 0)

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        return None

    def _lazy_init(self) -> None:
        return None

    def _is_in_bad_fork(self) -> bool:
        return self._forked

    def mark_forked(self) -> None:
        """Called in a child process, in which no thread of the parent's streams runs."""
        self._forked = True
        self.native.stop_using(
            "the device was initialized before this process was forked; start processes by "
            "'spawn' or 'forkserver', or use the device in the child alone"
        )

    def device_count(self) -> int:
        return int(self.native.device_count())

    def current_device(self) -> int:
        return int(self.native.current_device())

    def set_device(self, place: Any) -> None:
        self.native.set_device(as_device(place).index)

    def get_device_properties(self, place: Any = None) -> DeviceProperties:
        return DeviceProperties(**self.native.properties(as_device(place).index))

    def get_device_name(self, place: Any = None) -> str:
        return self.get_device_properties(place).name

    def get_device_capability(self, place: Any = None) -> tuple[int, int]:
        found = self.get_device_properties(place)
        return found.major, found.minor

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def can_device_access_peer(self, place: Any, peer: Any) -> bool:
        return True

    def synchronize(self, place: Any = None) -> None:
        """Wait for all work of a device. Raises the error of work that failed."""
        self.native.synchronize(as_device(place).index)

    # ---- streams --------------------------------------------------------------------------------

    def current_stream(self, place: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(as_device(place))

    def default_stream(self, place: Any = None) -> torch.Stream:
        index = as_device(place).index
        return torch.Stream(stream_id=0, device_index=index, device_type=self.type_number())

    def type_number(self) -> int:
        return int(torch.accelerator.current_stream().device_type)

    def set_stream(self, stream: torch.Stream | None) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        """A context in which `stream` is the current stream of its device."""
        if stream is None:
            yield
            return
        before = self.current_stream(stream.device)
        device_before = self.current_device()
        self.native.set_device(stream.device.index)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            self.native.set_device(device_before)

    def _sleep(self, cycles: int) -> None:
        """Keep the current stream busy for `cycles` microseconds / 1000."""
        self.native.sleep(cycles / 1e6)

    # ---- random state ---------------------------------------------------------------------------

    def generator(self, place: Any = None) -> torch.Generator:
        found: torch.Generator = self.native.default_generator(as_device(place).index)
        return found

    def manual_seed(self, seed: int) -> None:
        self.generator().manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self.generator(index).manual_seed(int(seed))

    def seed(self) -> None:
        self.generator().seed()

    def seed_all(self) -> None:
        self.manual_seed_all(self.generator().seed())

    def initial_seed(self) -> int:
        return self.generator().initial_seed()

    def get_rng_state(self, place: Any = None) -> torch.Tensor:
        return self.generator(place).get_state()

    def set_rng_state(self, state: torch.Tensor, place: Any = None) -> None:
        self.generator(place).set_state(state.cpu())

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(self.device_count())]

    def set_rng_state_all(self, states: Iterable[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            self.set_rng_state(state, index)

    # ---- memory ---------------------------------------------------------------------------------

    def _statistics(self, place: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.native.statistics(as_device(place).index)
        return found

    def memory_allocated(self, place: Any = None) -> int:
        return int(self._statistics(place)["allocated_bytes"]["current"])

    def max_memory_allocated(self, place: Any = None) -> int:
        return int(self._statistics(place)["allocated_bytes"]["peak"])

    def memory_reserved(self, place: Any = None) -> int:
        return int(self._statistics(place)["reserved_bytes"]["current"])

    def max_memory_reserved(self, place: Any = None) -> int:
        return int(self._statistics(place)["reserved_bytes"]["peak"])

    def memory_stats(self, place: Any = None) -> dict[str, int]:
        """Numbers such as `allocated_bytes.all.peak`, as torch.cuda names them."""
        found: dict[str, int] = {}
        for name, value in self._statistics(place).items():
            if isinstance(value, Mapping):
                found |= {f"{name}.all.{part}": number for part, number in value.items()}
            else:
                found[name] = value
        return found

    def memory_summary(self, place: Any = None, abbreviated: bool = False) -> str:
        return "\n".join(f"{name:32}{number:>20}" for name, number in
                         sorted(self.memory_stats(place).items()))  # fmt: skip

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Every segment of every device with its blocks, ordered by address."""
        segments: list[dict[str, Any]] = []
        for index in range(self.device_count()):
            for block in self.native.all_blocks(index):
                if block.pop("first"):
                    start = {"device": index, "address": block["address"], "total_size": 0}
                    segments.append({**start, "blocks": []})
                segments[-1]["blocks"].append(block)
                segments[-1]["total_size"] += block["size"]
        return segments

    def mem_get_info(self, place: Any = None) -> tuple[int, int]:
        free, total = self.native.memory_info(as_device(place).index)
        return free, total

    def caching_allocator_alloc(
        self, size: int, device: Any = None, stream: torch.Stream | None = None
    ) -> int:
        """The address of `size` bytes of a device, for work on `stream`."""
        with self.stream(stream):
            return int(self.native.allocate(size, as_device(device).index))

    def caching_allocator_delete(self, mem_ptr: int) -> None:
        """Frees what `caching_allocator_alloc` gave. Raises RuntimeError for a double free."""
        self.native.free(mem_ptr)

    def empty_cache(self) -> None:
        self.native.empty_cache()

    def reset_peak_memory_stats(self, place: Any = None) -> None:
        self.native.reset_peak(as_device(place).index)

    reset_max_memory_allocated = reset_peak_memory_stats

    def reset_accumulated_memory_stats(self, place: Any = None) -> None:
        self.native.reset_accumulated(as_device(place).index)

    def set_per_process_memory_fraction(self, fraction: float, place: Any = None) -> None:
        """Let this process use at most `fraction` of a device's memory."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction is {fraction}; expected a number from 0 to 1")
        index = as_device(place).index
        self.native.limit(index, int(fraction * self.native.memory_info(index)[1]))

    def ipc_collect(self) -> None:
        return None

    def memory_leaks(self) -> list[dict[str, Any]]:
        """The blocks that live now, on all devices: address, size, and `where` they were allocated.

        `where` is empty unless DIPU_MEM_CHECK_ENABLE_BACKTRACE=1.
        """
        gc.collect()
        return [b for k in range(self.device_count()) for b in self.native.live_blocks(k)]

    # ---- operators ------------------------------------------------------------------------------

    def set_fallback_ops(self, patterns: Sequence[str]) -> None:
        """Run the operators that match one of the regular expressions on the CPU."""
        self.dispatcher.set_fallback_ops(patterns)

    def dump_op_args(self, level: int) -> DumpLevel:
        """Print every operator from now on: 1 its name, 2 its arguments too, 3 their values too.

        As a context manager, until its end.
        """
        return DumpLevel(self.dispatcher, level)

    def path_counts(self) -> dict[tuple[str, str], int]:
        """How often each operator came through each path: `(name, path) -> number`.

        Calls that the native part runs alone are not counted.
        """
        return dict(self.dispatcher.counts.taken)
