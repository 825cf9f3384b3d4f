"""PyTorch's operators on the stand-in GPU: the host's, over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from stand_in.attention import ATTENTION
from torch.utils import _pytree as pytree

Host = Callable[[torch.Tensor], torch.Tensor]

OWN = frozenset({
    "empty.memory_format", "empty_strided", "as_strided", "view", "view_as_real", "view_as_complex",
    "_reshape_alias", "set_", "set_.source_Tensor", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "resize_", "_local_scalar_dense", "unfold", "alias",
    "_pin_memory", "is_pinned", "record_stream", "is_set_to", "_assert_async", "_assert_async.msg",
})  # fmt: skip
"""Operators that PyTorch itself carries out without a kernel."""
HIDDEN = ("aten::copy_", "aten::convolution", "aten::convolution_backward", "aten::_convolution")
"""Operators of all devices that come to the GPU's kernels inside."""


def below_autograd() -> AbstractContextManager[Any]:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(key)
    return guard


# ---- where the host has another operator ---------------------------------------------------------

aten = torch.ops.aten


def _softmax(x: Any, dim: int, to_float: bool) -> Any:
    return aten._softmax(x.float() if to_float else x, dim, False)


def _log_softmax(x: Any, dim: int, to_float: bool) -> Any:
    return aten._log_softmax(x.float() if to_float else x, dim, False)


def _convolution(
    x: Any, w: Any, padding: Any, stride: Any, dilation: Any, groups: int, *flags: bool
) -> Any:
    zero = [0] * len(stride)
    return aten.convolution(x, w, None, stride, padding, dilation, False, zero, groups)


def _convolution_transpose(
    x: Any, w: Any, padding: Any, more: Any, stride: Any, dilation: Any, groups: int, *flags: bool
) -> Any:
    return aten.convolution(x, w, None, stride, padding, dilation, True, more, groups)


def _batch_norm(*args: Any) -> Any:
    return *aten.native_batch_norm(*args), torch.empty(0, dtype=torch.uint8)


def _batch_norm_backward(
    x: Any, grad: Any, w: Any, mean: Any, var: Any, saved: Any, inverse: Any, eps: float, rest: Any
) -> Any:
    wanted = [True] * 3
    return aten.native_batch_norm_backward(grad, x, w, mean, var, saved, inverse, True, eps, wanted)


def _rms_norm_backward(grad: Any, x: Any, shape: Any, rstd: Any, w: Any, mask: Any) -> Any:
    dims = list(range(x.dim() - len(shape), x.dim()))
    wide, given, inverse = x.double(), grad.double(), rstd.double()
    scaled = given if w is None else given * w.double()
    mean = (scaled * wide).mean(dims, keepdim=True)
    dx = (scaled - wide * inverse**2 * mean) * inverse
    dw = (given * wide * inverse).sum_to_size(shape)
    return dx.to(x.dtype), None if w is None else dw.to(w.dtype)


OTHERWISE: dict[str, Callable[..., Any]] = {
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "cudnn_convolution": _convolution,
    "cudnn_convolution_transpose": _convolution_transpose,
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
}


# ---- all others ----------------------------------------------------------------------------------


def install(gpu: Any, on_host: Host, on_device: Host) -> None:
    """Registers an operator of the host wherever PyTorch has a kernel for GPUs."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("copy_", _Operator(aten.copy_.default, gpu, on_host, on_device).registered(),
                 "CUDA", allow_override=True)  # fmt: skip
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for name in {*names, *HIDDEN}:
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        op = getattr(getattr(aten, base, None), overload or "default", None)
        if space != "aten" or op is None or rest in OWN or "sparse" in rest or "nested" in rest:
            continue
        found = _Operator(op, gpu, on_host, on_device)
        library.impl(rest, found.registered(), "CUDA", allow_override=True)
    gpu.library = library


class _Operator:
    def __init__(self, op: Any, gpu: Any, on_host: Host, on_device: Host) -> None:
        self.op = op
        self.gpu = gpu
        self.on_host = on_host
        self.on_device = on_device
        self.takes_tensors = ["Tensor" in str(a.type) for a in op._schema.arguments]
        self.draws = any(a.name == "generator" for a in op._schema.arguments)

    def registered(self) -> Callable[..., Any]:
        return torch._dynamo.disable(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attention = ATTENTION.get(self.op._schema.name.partition("::")[2])
        if attention is not None:
            return attention(self.op, self.gpu, self.on_host, args, kwargs)
        result, given = self._run(args, kwargs)
        mine = {id(host): device for host, device in given}
        for host, device in given:
            if host.size() != device.size() or host.stride() != device.stride():
                device.resize_(host.size()).as_strided_(host.size(), host.stride())
                self.on_host(device).copy_(host)
        made: list[torch.Tensor] = []

        def shown(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) not in mine:
                mine[id(x)] = self.on_device(x)
                made.append(mine[id(x)])
            return mine[id(x)]

        results = pytree.tree_map(shown, result)
        if self.gpu.recording is not None:
            self.gpu.recording.append(lambda: self._again(args, kwargs, results, made))
        return results

    def _run(self, args: Any, kwargs: Any) -> tuple[Any, list[tuple[Any, Any]]]:
        """The host's results, and its tensors beside the device's."""
        given = []

        def moved(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and x.device.type == "cuda":
                given.append((self.on_host(x), x))
                return given[-1][0]
            if isinstance(x, torch.device) and x.type == "cuda":
                return torch.device("cpu")
            if isinstance(x, torch.Generator) and x.device.type == "cuda":
                return _host_generator(x)
            return x

        # A number in the place of a tensor takes part in promotion as a number.
        numbers = any(
            tensor and isinstance(x, (bool, int, float, complex))
            for x, tensor in zip(args, self.takes_tensors, strict=False)
        )
        with below_autograd():
            args, kwargs = pytree.tree_map(moved, (args, kwargs))
            leaves = [*args, *kwargs.values()]
            if self.draws and not any(isinstance(x, torch.Generator) for x in leaves):
                default = torch.cuda.default_generators[torch.cuda.current_device()]
                kwargs["generator"] = _host_generator(default)
            op = OTHERWISE.get(self.op._schema.name.partition("::")[2])
            return (op or (self.op.overloadpacket if numbers else self.op))(*args, **kwargs), given

    def _again(self, args: Any, kwargs: Any, results: Any, made: list[torch.Tensor]) -> None:
        """Repeats a recorded call into the results that it made."""
        found, _ = self._run(args, kwargs)
        for new, old in zip(pytree.tree_leaves(found), pytree.tree_leaves(results), strict=True):
            if any(old is x for x in made):
                self.on_host(old).copy_(new)


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """A generator of the host at the state of the device's, which moves on."""
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    host = torch.Generator()
    host.manual_seed((generator.initial_seed() * 1000003 + offset) % 2**63)
    return host
