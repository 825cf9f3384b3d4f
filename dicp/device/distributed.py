"""`torch.distributed` backend `dicl`: the vendor's collectives of device tensors.

Tensors, dtypes and operations for which the vendor's runtime has no collective go by gloo, on host
views.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed

from dicp.device.hosted import DEVICE_TYPE
from dicp.device.runtime_interface import (
    DTYPES,
    IDENTIFIER_BYTES,
    PREFIX,
    REDUCTIONS,
    UNSUPPORTED,
    declare,
    has_collectives,
    last_error,
)
from dicp.errors import CollectiveError
from dicp.torch_private import queued_work

NAME = "dicl"
DISPATCH_KEY = "PrivateUse1"


class ProcessGroupDICL(distributed.ProcessGroupGloo):
    """Collectives of host tensors, and of device tensors that the vendor's runtime leaves."""


def register_backend(native: Any, runtime: Any, visible: Sequence[int] | None) -> None:
    """Register `dicl` for device and host tensors.

    `visible` holds the runtime's numbers of the devices.
    """
    native.register_collectives()  # on host views
    if has_collectives(runtime):
        declare(runtime)
        native.hold(Collectives(native, runtime, visible).register())
    distributed.Backend.register_backend(NAME, _create, devices=["cpu", DEVICE_TYPE])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return ProcessGroupDICL(store, rank, size, timeout)


class Communicator:
    """A device's membership in a process group, by the vendor's runtime."""

    def __init__(self, runtime: Any, device: int, group: Any, key: str) -> None:
        self.runtime, self.rank, self.size = runtime, group.rank(), group.size()
        identifier = ctypes.create_string_buffer(IDENTIFIER_BYTES)
        store = group.get_group_store()
        if self.rank == 0:
            self.call("communicator_identifier", identifier)
            store.set(key, identifier.raw.hex())
        else:
            identifier.raw = bytes.fromhex(store.get(key).decode())
        handle = ctypes.c_void_p()
        place = ctypes.byref(handle)
        self.call("communicator_create", device, identifier, self.rank, self.size, place)
        self.handle = handle
        weakref.finalize(self, getattr(runtime, f"{PREFIX}communicator_destroy"), handle)

    def call(self, name: str, *args: Any, accepted: Sequence[int] = (0,)) -> int:
        """The status of a call. Raises CollectiveError for one that is not accepted."""
        status = int(getattr(self.runtime, PREFIX + name)(*args))
        if status not in accepted:
            message = last_error(self.runtime)
            raise CollectiveError(PREFIX + name, self.rank, self.size, status, message)
        return status


class Collectives:
    """PyTorch's operators of collectives, for device tensors.

    A method has its operator's arguments and returns the tensors of its result, or None where gloo
    has to do the work, which every rank decides alike.
    """

    def __init__(self, native: Any, runtime: Any, visible: Sequence[int] | None) -> None:
        self.native, self.runtime, self.visible = native, runtime, visible
        self.communicators: weakref.WeakKeyDictionary[Any, dict[int, Communicator]]
        self.communicators = weakref.WeakKeyDictionary()

    def register(self) -> torch.library.Library:
        library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the kernels on host views are replaced
            for name, method in (
                ("allreduce_", self.all_reduce),
                ("broadcast_", self.broadcast),
                ("allgather_", self.all_gather),
                ("_allgather_base_", self.all_gather_flat),
                ("reduce_scatter_", self.reduce_scatter),
                ("_reduce_scatter_base_", self.reduce_scatter_flat),
                ("alltoall_base_", self.all_to_all),
            ):
                library.impl(name, self._kernel(name, method), DISPATCH_KEY)
        return library

    def _kernel(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with torch.no_grad():
                results = method(*args)
            if results is None:
                if name == "_allgather_base_":  # gloo splits its first dimension, which may be 1
                    args = (args[0].view(-1), args[1].view(-1), *args[2:])
                return self.native.host_call(f"c10d::{name}", "", args, {})
            nested = results if isinstance(results, list) else [results]
            flat = nested[0] if isinstance(nested[0], list) else nested
            work = queued_work(flat)
            return work if name == "alltoall_base_" else (results, work)

        return run

    def _call(self, name: str, group: Any, device: torch.device, *args: Any) -> bool:
        """Whether the runtime has this collective."""
        group, index = distributed.ProcessGroup.unbox(group), device.index
        made = self.communicators.setdefault(group, {})
        if index not in made:
            number = index if self.visible is None else self.visible[index]
            made[index] = Communicator(self.runtime, number, group, f"{NAME}/{len(made)}")
        stream = self.native.current_stream_handle(index)
        member, accepted = made[index], (0, UNSUPPORTED)
        return member.call(name, member.handle, *args, stream, accepted=accepted) == 0

    def _reduce(
        self, name: str, group: Any, op: Any, source: torch.Tensor, to: torch.Tensor
    ) -> bool:
        dtype, how = str(source.dtype).removeprefix("torch."), _REDUCTIONS.get(op.op())
        if dtype not in DTYPES or how is None or not to.numel():
            return False
        codes = DTYPES.index(dtype), REDUCTIONS.index(how)
        places = source.data_ptr(), to.data_ptr()
        return self._call(name, group, source.device, *places, to.numel(), *codes)

    def all_reduce(
        self, tensors: list[torch.Tensor], group: Any, op: Any, sparse: Any = None, *_: Any
    ) -> Any:
        if len(tensors) != 1 or sparse is not None:
            return None
        flat = tensors[0].contiguous()
        if not self._reduce("all_reduce", group, op, flat, flat):
            return None
        return _written(tensors, [flat])

    def reduce_scatter_flat(
        self, output: torch.Tensor, source: torch.Tensor, group: Any, op: Any, *_: Any
    ) -> Any:
        size = distributed.ProcessGroup.unbox(group).size()
        if not _has_all_ranks(output, source, size):
            return None
        to, given = output.contiguous(), source.contiguous()
        if not self._reduce("reduce_scatter", group, op, given, to):
            return None
        return _written([output], [to])[0]

    def reduce_scatter(
        self, outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], group: Any, op: Any,
        *_: Any,
    ) -> Any:  # fmt: skip
        if len(outputs) != 1 or any(s.shape != outputs[0].shape for s in sources[0]):
            return None
        found = self.reduce_scatter_flat(outputs[0], torch.stack(sources[0]), group, op)
        return None if found is None else outputs

    def broadcast(self, tensors: list[torch.Tensor], group: Any, root: int, *_: Any) -> Any:
        if len(tensors) != 1 or not tensors[0].numel():
            return None
        flat = tensors[0].contiguous()
        if not self._call("broadcast", group, flat.device, flat.data_ptr(), flat.nbytes, root):
            return None
        return _written(tensors, [flat])

    def _move(
        self, name: str, group: Any, output: torch.Tensor, source: torch.Tensor, size: int
    ) -> bool:
        to, given = output.contiguous(), source.contiguous()
        places = given.data_ptr(), to.data_ptr(), size
        if not size or not self._call(name, group, given.device, *places):
            return False
        _written([output], [to])
        return True

    def all_gather_flat(
        self, output: torch.Tensor, source: torch.Tensor, group: Any, *_: Any
    ) -> Any:
        size = distributed.ProcessGroup.unbox(group).size()
        if not _has_all_ranks(source, output, size):
            return None
        moved = self._move("all_gather", group, output, source, source.nbytes)
        return output if moved else None

    def all_gather(
        self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], group: Any, *_: Any
    ) -> Any:
        if len(sources) != 1 or any(o.shape != sources[0].shape for o in outputs[0]):
            return None
        gathered = sources[0].new_empty(len(outputs[0]), *sources[0].shape)
        if self.all_gather_flat(gathered, sources[0], group) is None:
            return None
        for output, part in zip(outputs[0], gathered, strict=True):
            output.copy_(part)
        return outputs

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, group: Any, to_sizes: list[int],
        from_sizes: list[int], *_: Any,
    ) -> Any:  # fmt: skip
        size = distributed.ProcessGroup.unbox(group).size()
        even = not to_sizes and not from_sizes and source.dim() > 0 and source.shape[0] % size == 0
        if not even or not _has_all_ranks(output, source, 1):
            return None
        moved = self._move("all_to_all", group, output, source, source.nbytes // size)
        return output if moved else None


def _has_all_ranks(part: torch.Tensor, whole: torch.Tensor, size: int) -> bool:
    """Whether `whole` holds what each of `size` ranks gives or gets."""
    same = part.dtype == whole.dtype and part.device == whole.device
    return same and part.numel() * size == whole.numel()


def _written(tensors: list[torch.Tensor], flat: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results, filled from contiguous copies where they are not contiguous themselves."""
    for tensor, copy in zip(tensors, flat, strict=True):
        if tensor is not copy:
            tensor.copy_(copy)
    return tensors


_OP = distributed.ReduceOp.RedOpType
_REDUCTIONS = {
    int(op): name
    for op, name in zip((_OP.SUM, _OP.PRODUCT, _OP.MIN, _OP.MAX, _OP.AVG), REDUCTIONS, strict=True)
}
