"""Tensors without the dispatcher: fresh memory, views, versions, true devices; fake ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._dynamo import guards as native_guards
from torch._guards import TracingContext
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses import fake_tensor
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

check_size = torch._check
"""Raises the RuntimeError of a message unless a relation holds, which is a guard if symbolic."""
empty_strided_cpu = native_guards._empty_strided_cpu  # type: ignore[attr-defined]
"""`torch.empty_strided(size, stride, dtype)` on the CPU, bypassing the dispatcher."""
reinterpret_tensor = native_guards._reinterpret_tensor  # type: ignore[attr-defined]
"""`tensor.as_strided(size, stride, tensor.storage_offset() + offset)`, bypassing the dispatcher."""
_dispatch_mode = torch._C._get_dispatch_mode  # type: ignore[attr-defined]
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_get_device = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]


def true_device(tensor: torch.Tensor) -> torch.device:
    """A tensor's device, whatever name the attribute `device` shows."""
    if torch._C._len_torch_function_stack() == 0:
        return _get_device(tensor)  # type: ignore[no-any-return]
    with torch._C.DisableTorchFunction():  # a mode would look the attribute up again
        return _get_device(tensor)  # type: ignore[no-any-return]


def is_tracing() -> bool:
    """Whether this thread compiles: PyTorch makes fake tensors of real ones' attributes."""
    return TracingContext.try_get() is not None


def traced_fake_mode() -> FakeTensorMode | None:
    """The mode of the fake tensors that PyTorch traces now; None where it does not trace."""
    context = TracingContext.try_get()
    return None if context is None else context.fake_mode


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made within are fake. Operators that refuse arguments raise, and log nothing."""
    log, before = fake_tensor.log, fake_tensor.log.disabled
    log.disabled = True
    try:
        with FakeTensorMode():
            yield
    finally:
        log.disabled = before


def is_object(value: Any) -> bool:
    """Whether an input's traced value stands for an object that operators take beside tensors: a
    device mesh, a generator, a TorchScript object, one of a type registered as opaque."""
    return isinstance(value, (FakeScriptObject, torch.ScriptObject))


def need_eager(inputs: Sequence[Any], parameters: Sequence[Any]) -> bool:
    """Whether this thread makes fake tensors only, or one of these has a tangent, of forward-mode
    differentiation: compiled code takes neither."""
    if _dispatch_mode(_FAKE) is not None:
        return True
    level = forward_ad._current_level
    if level < 0:
        return False
    tensors = (value for value in (*inputs, *parameters) if isinstance(value, torch.Tensor))
    return any(torch._VF._unpack_dual(tensor, level=level)[1] is not None for tensor in tensors)


def is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def without_real_base(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor; a view of a real one becomes a tensor of the same memory that is known as a
    view of none."""
    base = tensor._base
    if base is None or base.is_complex():
        return tensor
    alone = tensor.new_empty(0).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    alone = alone.conj() if tensor.is_conj() else alone
    return torch._neg_view(alone) if tensor.is_neg() else alone


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for one of a batch, under the `vmap` of the autograd engine."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def map_over_batch(run: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> list[Any]:
    """The batched results of a function that takes no batched tensors: one run for each element of
    the innermost batch."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    whole = {
        k: torch._remove_batch_dim(value, level, 1, 0)
        for k, value in enumerate(inputs) if isinstance(value, torch.Tensor) and is_batched(value)
    }  # fmt: skip
    (size,) = {batch.shape[0] for batch in whole.values()}
    runs = [
        run([whole[k][row] if k in whole else value for k, value in enumerate(inputs)])
        for row in range(size)
    ]
    return [
        torch._add_batch_dim(torch.stack(results), 0, level)
        if isinstance(results[0], torch.Tensor) else results[0]
        for results in zip(*runs, strict=True)
    ]  # fmt: skip


def sharing_inputs(inputs: Sequence[Any]) -> list[list[int]]:
    """Positions of inputs, real or fake, that share memory with others: a list for each memory."""
    groups: dict[int, list[int]] = {}
    for position, value in enumerate(inputs):
        memory = _memory_of(value)
        if memory is not None:
            groups.setdefault(memory, []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def are_apart(x: Any, y: Any) -> bool:
    """Whether two strided tensors, real or fake, share no memory; False for other values."""
    memories = {_memory_of(x), _memory_of(y)}
    return len(memories) == 2 and None not in memories


def _memory_of(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
    if is_wrapped or is_traceable_wrapper_subclass(value):
        return None
    return int(value.untyped_storage()._cdata)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages of Python share the memory of `storage`."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd knows this one as a view of; None if it is a view of none."""
    return tensor._base if tensor._is_view() else None


def is_nested_or_transformed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nested or wrapped by a function transform, such as vmap."""
    return tensor.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; zeros for one that autograd keeps without memory."""
    if not tensor._is_zerotensor():
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was written in place; -1 for one that does not count that."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return -1 if tensor.is_inference() or is_wrapped else int(tensor._version)


def give_shapes(rules: Mapping[Any, Callable[..., Any]]) -> None:
    """Let FakeTensors of operators have the shapes of their decompositions' results."""

    def shaped(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return rules[op](*args, **kwargs)

    for op in rules:
        register_op_impl(op)(shaped)
