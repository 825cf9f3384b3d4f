"""Compiled graphs as they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dicp.errors.base import DicpError
from dicp.errors.text import amount, at, compiled_from, sentence

__all__ = [
    "CollectiveError", "DeviceError", "DeviceMemoryError", "DeviceMovedError", "HostMemoryError",
    "IndexOutOfBoundsError", "InputLayoutError", "InputMismatchError",
    "IntegerDivisionByZeroError", "LaunchError", "ModelMismatchError", "NarrowingError",
    "ResultMismatchError", "RunFailureError", "RunStatusError", "SizeMismatchError",
]  # fmt: skip


class _RunError(DicpError):
    """A compiled graph that did not run: what happened, of which operators, what to do next."""

    def __init__(self, target: str, problem: str, sources: Sequence[str], advice: str) -> None:
        self.target = target
        lines = [f"target {target!r}: {problem}.", *compiled_from(sources), advice]
        super().__init__("\n".join(lines))


class LaunchError(_RunError):
    """The device's driver refused to run a compiled kernel, or an earlier kernel failed on it."""

    def __init__(self, target: str, kernel: str, reason: str, sources: Sequence[str] = ()) -> None:
        self.kernel = kernel
        self.reason = reason
        self.kernel_sources = tuple(sources)
        super().__init__(
            target, f"kernel {kernel} cannot be run: {reason}", sources,
            "Where the device reports a failed assertion or an illegal access, the message printed "
            "before this one names the operator; the process must be started again.",
        )  # fmt: skip


class RunStatusError(_RunError):
    """A target's run gave something other than the status of a success or of a failed kernel."""

    def __init__(
        self, target: str, what: str, status: object, expected: str, sources: Sequence[str] = ()
    ) -> None:
        self.status = status
        super().__init__(
            target, f"the run of {what} gave status {status!r}, not {expected}", sources,
            "Its results cannot be trusted. The device may have refused the launch, or the "
            "target's run returns no status: see `python -m dicp doctor` and "
            "docs/adding_a_vendor.md.",
        )  # fmt: skip


class RunFailureError(_RunError):
    """A target's own code raised an exception, the cause of this error, while a graph ran."""

    def __init__(
        self, target: str, what: str, problem: str, place: str, sources: Sequence[str] = ()
    ) -> None:
        self.problem = problem
        self.place = place
        super().__init__(
            target, f"the run of {what} raises {problem}, at {place}", sources,
            "Fix the target there, or report it; until then eager_ops (DICP_EAGER_OPS) runs these "
            "operators eagerly.",
        )  # fmt: skip


class DeviceError(DicpError):
    """The device's runtime reported a failure. `message` holds its own words."""

    def __init__(self, target: str, call: str, status: int, message: str) -> None:
        self.target = target
        self.call = call
        self.status = status
        self.message = message
        super().__init__(
            f"target {target!r}: {call} failed with status {status}: "
            f"{sentence(message or 'no message')} "
            "The state of the device is unknown; restart the process if the next run fails too."
        )


class CollectiveError(DicpError):
    """A collective of the vendor's runtime failed. `message` holds its own words."""

    def __init__(self, call: str, rank: int, size: int, status: int, message: str) -> None:
        self.call = call
        self.rank = rank
        self.size = size
        self.status = status
        self.message = message
        super().__init__(
            f"dicl: {call} failed on rank {rank} of {size} with status {status}: "
            f"{sentence(message or 'no message')} "
            "The other ranks may wait for this one; end all processes and start them again."
        )


class DeviceMemoryError(DicpError, MemoryError):
    """The device has too little free memory for a graph."""

    def __init__(self, target: str, wanted: int, what: str) -> None:
        self.target = target
        self.wanted = wanted
        self.what = what
        super().__init__(
            f"target {target!r}: the device is out of memory for {what}{amount(wanted)}. Use a "
            "smaller batch, free tensors that are no longer needed, or run fewer graphs at a time."
        )


class HostMemoryError(DicpError, MemoryError):
    """A kernel on the host got no memory for what it keeps while it runs."""

    def __init__(self, operators: Sequence[str], wanted: int) -> None:
        self.operators = operators
        self.wanted = wanted
        more = f" and {len(operators) - 1} more" if len(operators) > 1 else ""
        super().__init__(
            f"{operators[0]}{more}: the host is out of memory for the kernel's workspace"
            f"{amount(wanted)}. Use a smaller batch or fewer threads, or free tensors that are no "
            "longer needed."
        )


class ModelMismatchError(DicpError):
    """A built model does not fit the device that is to run it."""

    def __init__(self, target: str, built_for: str, found: str) -> None:
        self.target = target
        self.built_for = built_for
        self.found = found
        super().__init__(
            f"target {target!r}: the model was built for {built_for} and this device is {found}. "
            "Remove it with `python -m dicp cache clear`, and compile again on this machine."
        )


class InputMismatchError(DicpError):
    """An input contradicts what the graph was compiled for."""

    def __init__(self, index: int, expected: str, got: str) -> None:
        self.index = index
        self.expected = expected
        self.got = got
        super().__init__(
            f"input {index} of the compiled graph is {got}; the graph was compiled for {expected}. "
            "Call the function returned by torch.compile, which recompiles where that is needed, "
            "and not the compiled graph itself."
        )


class InputLayoutError(InputMismatchError):
    """A kernel reads an input whose memory strides do not describe."""

    def __init__(self, index: int, layout: Any) -> None:
        super().__init__(index, "a strided tensor", f"one of layout {layout}")


class ResultMismatchError(DicpError):
    """The sizes of a result depend on data, and are not those the program promised."""

    def __init__(self, op: str, expected: Sequence[int], got: Sequence[int]) -> None:
        self.op = op
        self.expected = tuple(expected)
        self.got = tuple(got)
        super().__init__(
            f"{op} gave a tensor of sizes {list(got)}, where checks in the program (torch._check) "
            f"promise {list(expected)}. Correct the check, or remove it."
        )


class DeviceMovedError(DicpError):
    """The model or its inputs went to another device after compilation."""

    def __init__(self, expected: object, got: object) -> None:
        self.expected = str(expected)
        self.got = str(got)
        super().__init__(
            f"the graph was compiled for device {expected} and is called with tensors on {got}. "
            "Move the model and its inputs to one device before the call, and call torch.compile "
            "again after moving the model."
        )


class IndexOutOfBoundsError(DicpError, IndexError):
    """An index outside its dimension, found before or by a compiled kernel (check_bounds=True)."""

    def __init__(
        self, op: str, user_line: str, index: int | None, size: int, wraps: bool = True
    ) -> None:
        self.op = op
        self.user_line = user_line
        self.index = index
        """None: any index into an empty dimension."""
        self.size = size
        what = "an index" if index is None else str(index)
        rule = ", or from -1 backwards" if wraps else " and may not be negative"
        super().__init__(
            f"{op}: index out of range: {what} in a dimension of size {size}.{at(user_line)} "
            f"Indices count from 0{rule}; clamp them, or enlarge the dimension."
        )


class SizeMismatchError(DicpError, RuntimeError):
    """Arguments whose sizes do not fit together, found before a compiled graph runs."""

    def __init__(self, op: str, user_line: str, detail: str, left: int, right: int) -> None:
        self.op = op
        self.user_line = user_line
        self.detail = detail
        super().__init__(
            f"{op}: {detail}: {left} and {right}.{at(user_line)} Make these sizes equal."
        )


class IntegerDivisionByZeroError(DicpError, ZeroDivisionError):
    """An integer division or remainder by zero, found by a compiled kernel."""

    def __init__(self, op: str, user_line: str) -> None:
        self.op = op
        self.user_line = user_line
        super().__init__(
            f"{op}: integer division or remainder by zero.{at(user_line)} "
            "Mask the divisor, or divide in a floating-point type."
        )


class NarrowingError(DicpError):
    """An integer that does not fit the type to which the adaptor file casts it."""

    def __init__(self, operator: str, value: int, dtype: object) -> None:
        self.operator = operator
        self.value = value
        super().__init__(
            f"{operator}: {value} does not fit {dtype}, to which the target's adaptor file casts. "
            "`allow_narrowing: True` in the file lets such numbers wrap around; "
            f"eager_ops={operator.partition('.')[0]!r} keeps the operator's own type."
        )
