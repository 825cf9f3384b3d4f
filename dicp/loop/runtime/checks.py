"""What a run refuses: inputs and sizes that the program was not compiled for, failed kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from dicp.errors import (
    HostMemoryError,
    IndexOutOfBoundsError,
    InputLayoutError,
    InputMismatchError,
    IntegerDivisionByZeroError,
    RunStatusError,
    SizeMismatchError,
)
from dicp.loop.schedule.placement import Placement, Step
from dicp.serialize import evaluate_size


def check_inputs(placement: Placement, inputs: Sequence[Any]) -> None:
    """Raises InputMismatchError unless the inputs are laid out as the graph was compiled for.

    Inputs that only calls read may have another dtype and other sizes: PyTorch's shape functions
    are wrong about what some operators save for others, and differ between releases.
    """
    addressed = placement.addressed
    for position, slot in placement.inputs:
        tensor, buffer = inputs[position], placement.buffers[slot]
        if tensor is None or slot not in addressed:  # None: an effect token
            continue
        if tensor.layout != torch.strided or not buffer.strides:
            continue
        if (
            tuple(tensor.shape) != buffer.shape
            or tensor.dtype != buffer.dtype
            or not laid_out_as(tensor, buffer.strides)
        ):
            raise InputMismatchError(
                position,
                f"{buffer.dtype}{list(buffer.shape)} strides {list(buffer.strides)}",
                f"{tensor.dtype}{list(tensor.shape)} strides {list(tensor.stride())}",
            )


def check_layouts(placement: Placement, inputs: Sequence[Any]) -> None:
    """Raises InputLayoutError for an input of kernels whose layout has no strides."""
    for position in placement.kernel_inputs:
        tensor = inputs[position]
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided and tensor.numel():
            raise InputLayoutError(position, tensor.layout)


def laid_out_as(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether all elements lie where `strides` place them; sizes of 1 make a stride arbitrary."""
    own = tensor.stride()
    return own == strides or tensor.numel() == 0 or all(
        size <= 1 or mine == other
        for size, mine, other in zip(tensor.shape, own, strides, strict=True)
    )  # fmt: skip


def check_sizes(requirements: Sequence[Mapping[str, Any]], symbols: Mapping[str, int]) -> None:
    """Raises SizeMismatchError or IndexOutOfBoundsError for sizes that eager rejects."""
    for requirement in requirements:
        left, right = (evaluate_size(s, symbols) for s in requirement["sizes"])
        operator, _, line = requirement["origin"].partition(" at ")
        if requirement["kind"] == "equal" and left != right:
            raise SizeMismatchError(operator, line, requirement["detail"], left, right)
        if requirement["kind"] == "indexable" and left == 0 and right > 0:
            raise IndexOutOfBoundsError(operator, line, None, 0)


def raise_kernel_error(
    launches: Sequence[Step], stopped: object, status: Sequence[int], target: str
) -> NoReturn:
    """Raises the error of the kernel that `stopped`, which is its position counted from 1.

    `status` holds what the kernel wrote: error code, check site, index and limit.
    """
    code, site, index, size = status
    known = type(stopped) is int and 1 <= stopped <= len(launches)
    step = launches[stopped - 1] if type(stopped) is int and known else launches[0]
    if not known or code not in (1, 2, 3):
        names = ", ".join(each["kernel"] for each in ([step] if known else launches))
        expected = "0, or a kernel's position from 1 with its error in the table `status`"
        raise RunStatusError(target, names, stopped, expected, list(map(str, step["origins"])))
    if code == 3:
        raise HostMemoryError(step["origins"], site)
    check, origin = step["sites"][site - 1]
    operator = "; ".join(f"{o.op} ({o.node})" for o in ([origin] if origin else step["origins"]))
    line = origin.user_line if origin else ""
    if code == 2:
        raise IntegerDivisionByZeroError(operator, line)
    raise IndexOutOfBoundsError(operator, line, index, size, check == "wrap_index")
