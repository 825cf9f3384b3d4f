"""Observers of the device's operators: live comparison with the CPU, and dumps of arguments.

Their printed forms are those of public torch_dipu, so that readers of its logs keep working.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dicp.config import dump_level
from dicp.device.dispatcher import Dispatcher, draws
from dicp.device.output import say
from dicp.device.patterns import Patterns
from dicp.device.schemas import bound, name_of, taking_numbers
from dicp.torch_private import OpOverload, schema_of, true_device

Args = tuple[Any, ...]
_SHOWN = 10
_TOLERANCE = 1e-3
_NAMES = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16", torch.int64: "long int", torch.int32: "int",
    torch.int16: "short int", torch.int8: "signed char", torch.uint8: "unsigned char",
    torch.bool: "bool", torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}  # fmt: skip


def describe(tensor: torch.Tensor) -> str:
    """One line: sizes, strides, options and address of a tensor."""

    def flag(value: bool) -> str:
        return "true" if value else "false (default)"

    kind = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    layout = str(tensor.layout).removeprefix("torch.").capitalize()
    options = (
        f"dtype={kind}, device={true_device(tensor)}, layout={layout}, "
        f"requires_grad={flag(tensor.requires_grad)}, pinned_memory=false (default), "
        "memory_format=(nullopt)"
    )
    return (
        f"numel:{tensor.numel()}, sizes:{list(tensor.shape)}, stride:{list(tensor.stride())}, "
        f"is_view:{int(tensor.storage_offset() != 0 or tensor.numel() != _held(tensor))}, "
        f"TensorOptions({options}), data_ptr:{tensor.data_ptr():#x}"
    )


def _held(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1)


def function_name(op: OpOverload) -> str:
    return f"dipu_{name_of(op).replace('.', '_')}"


# ---- comparison ----------------------------------------------------------------------------------


class AutoCompare:
    """Runs every listed operator on the CPU too, and prints how the results agree."""

    def __init__(self, dispatcher: Dispatcher, patterns: Patterns) -> None:
        self.dispatcher, self.patterns = dispatcher, patterns

    def __call__(
        self, op: OpOverload, args: Args, kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        name = name_of(op)
        if not self.patterns.match(name) or draws(op):
            return run()
        host_args, host_kwargs = _on_host((args, dict(kwargs)), {})
        result = run()
        lines = [f"{function_name(op)}_autocompare"]
        try:
            expected = op(*host_args, **host_kwargs)
            lines += self._lines(op, args, kwargs, result, (host_args, host_kwargs, expected))
        except Exception as error:
            lines.append(f"not_close comparison error: {' '.join(str(error).split())}")
        say("\n".join(lines))
        return result

    def _lines(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        host: tuple[Any, Any, Any],
    ) -> Iterator[str]:
        host_args, host_kwargs, expected = host
        name = name_of(op)
        ours, theirs = bound(op, args, kwargs), bound(op, host_args, host_kwargs)
        written = {
            a.name for a in schema_of(op).arguments if a.alias_info and a.alias_info.is_write
        }
        if not written:
            yield from compare(f"{name} out", theirs=expected, ours=result)
        for argument in (n for n in ours if n in written):
            yield from compare(f"{name} {argument}", theirs[argument], ours[argument])
        for argument in (n for n in ours if n not in written):
            yield from compare(f"{name} {argument}", theirs[argument], ours[argument], False)


def compare(label: str, theirs: Any, ours: Any, described: bool = True) -> Iterator[str]:
    """The lines of one comparison: CPU tensor, device tensor, verdict; else the verdict alone."""
    if isinstance(ours, (list, tuple)):
        if not isinstance(theirs, (list, tuple)) or len(theirs) != len(ours):
            yield f"autocompare:    {label}: not_allclose, lengths differ"
            return
        for k, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            yield from compare(f"{label} {k}-th", a, b, described)
        return
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return
    if not described:
        yield f"autocompare:    {label}: {verdict(theirs, ours.cpu())}"
        return
    yield f"autocompare:    {label}:"
    yield f"  {describe(theirs)}"
    yield f"  {describe(ours)}"
    yield f"  {verdict(theirs, ours.cpu())}"


def verdict(expected: torch.Tensor, found: torch.Tensor) -> str:
    """`allclose`, or `not_close` with the errors, where the largest is, and the first values."""
    if expected.shape != found.shape:
        return f"not_close, sizes {list(expected.shape)} and {list(found.shape)}"
    a, b = _wide(expected), _wide(found)
    if torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
        return "allclose"
    error = (a - b).abs().nan_to_num(nan=float("inf"))
    relative = (error / a.abs().clamp_min(1e-12)).max()
    index = torch.unravel_index(error.argmax(), error.shape) if error.dim() else ()
    first = f"{a.flatten()[:_SHOWN].tolist()} {b.flatten()[:_SHOWN].tolist()}"
    return (
        f"not_close, max diff: {error.max().item():.6g}, MAE: {error.mean().item():.6g}, "
        f"max relative diff: {relative.item():.6g}, at {[int(i) for i in index]}, "
        f"first values: {first}"
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _on_host(value: Any, known: dict[Any, torch.Tensor]) -> Any:
    """Copies on the CPU of the tensors in `value`, with their strides; one of each in `known`."""
    if isinstance(value, torch.Tensor):
        key = value.data_ptr(), value.dtype, value.shape, value.stride()
        if key not in known:  # a result that is an operand, too, is written for both
            strided = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            dense = value.numel() == 0 or 0 not in value.stride()
            known[key] = strided.copy_(value) if dense else value.cpu()
        return known[key]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item, known) for item in value)
    if isinstance(value, dict):
        return {name: _on_host(item, known) for name, item in value.items()}
    return value


# ---- dumps ---------------------------------------------------------------------------------------


class Dump:
    """Prints every operator: 1 its name and its function in the vendor's operator library, if it
    has one, else its name again; 2 its arguments too, 3 their values too.

    `level` is fixed, or None for DIPU_DUMP_OP_ARGS, which is read at every call.
    """

    def __init__(self, dispatcher: Dispatcher, level: int | None) -> None:
        self.dispatcher, self.level = dispatcher, level

    def __call__(
        self, op: OpOverload, args: Args, kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        level = dump_level() if self.level is None else self.level
        if level > 0:
            library = self.dispatcher.operator_library
            called = (library and library.function_for(op, args, kwargs)) or name_of(op)
            say("\n".join(_dumped(op, called, args, kwargs, level)))
        return run()


def _dumped(
    op: OpOverload, called: str, args: Sequence[Any], kwargs: Mapping[str, Any], level: int
) -> Iterator[str]:
    yield f"[{function_name(op)}:{_caller_line()}]:{name_of(op)}  {called}"
    if level < 2:
        return
    given = bound(op, args, kwargs)
    name = name_of(taking_numbers(op, given))
    for argument, value in given.items():
        yield f"  {name}: {argument}:{_text(value, level)}"


def _text(value: Any, level: int) -> str:
    if isinstance(value, torch.Tensor):
        line = describe(value)
        return f"{line}\n{value.cpu()}" if level > 2 else line
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, level) for item in value)}]"
    return "" if value is None else str(value)


def _caller_line() -> int:
    """The line of the program's innermost frame outside of torch and dicp."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in ("torch", "dicp"):
            return frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return 0


class DumpLevel:
    """The level at which operators are printed; the end of its context restores the one before."""

    def __init__(self, dispatcher: Dispatcher, level: int) -> None:
        self.dispatcher = dispatcher
        self.before = [one for one in dispatcher.observers if isinstance(one, Dump)]
        self._set([Dump(dispatcher, level)] if level > 0 else [])

    def _set(self, dumps: Sequence[Dump]) -> None:
        others = [one for one in self.dispatcher.observers if not isinstance(one, Dump)]
        self.dispatcher.observers = [*others, *dumps]
        self.dispatcher.update_watching()

    def __enter__(self) -> DumpLevel:
        return self

    def __exit__(self, *_: object) -> None:
        self._set(self.before)
