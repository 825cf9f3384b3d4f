"""Text tables with borders of +, - and |, and the rows that describe arguments and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

ARGUMENT_COLUMNS = (
    "name",
    "device",
    "dtype",
    "numel",
    "shape",
    "stride",
    "requires_grad",
    "layout",
    "data_ptr",
)
LONGEST_VALUE = 120


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows under the names of the columns, every cell centered."""
    texts = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[k]) for row in texts) for k in range(len(columns))]
    border = "+" + "+".join("-" * (width + 2) for width in widths) + "+"

    def line(row: Sequence[str]) -> str:
        cells = (f" {cell.center(width)} " for cell, width in zip(row, widths, strict=True))
        return f"|{'|'.join(cells)}|"

    return "\n".join([border, line(texts[0]), border, *map(line, texts[1:]), border])


def labelled(value: Any, label: str) -> Iterator[tuple[str, Any]]:
    """Each leaf of an argument or compared value with its name: `label[0]`, `label [1][0]`.

    A single positional argument, and a result that is no sequence, has no index.
    """
    if not isinstance(value, (tuple, list)):
        yield from _nested(value, label)
        return
    for k, item in enumerate(value):
        if isinstance(item, (tuple, list, Mapping)) and not isinstance(item, torch.Size):
            yield from _nested(item, f"{label} [{k}]")
        else:
            yield f"{label}[{k}]", item


def labelled_result(value: Any, label: str) -> Iterator[tuple[str, Any]]:
    """Each leaf of a result with its name: `label`, or `label [0][1]` among several."""
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        yield from _nested(value, f"{label} [0]")
    else:
        yield from _nested(value, label)


def _nested(value: Any, label: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for k, item in enumerate(value):
            yield from _nested(item, f"{label}[{k}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nested(item, f"{label}[{key!r}]")
    else:
        yield label, value


def labelled_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], label: str
) -> Iterator[tuple[str, Any]]:
    """The leaves of a call's arguments: positional ones by number, others by their keyword."""
    if len(args) == 1 and not isinstance(args[0], (tuple, list)):
        yield from _nested(args[0], label)
    else:
        yield from labelled(list(args), label)
    for key, value in kwargs.items():
        yield from _nested(value, f"{label} {key}")


def argument_table(rows: Sequence[tuple[str, Any]]) -> str:
    """A table of tensors and other values; the column `value` only if a row has one."""
    described = [(name, _tensor_cells(value), _value_cell(value)) for name, value in rows]
    valued = any(value for _, _, value in described)
    columns = (*ARGUMENT_COLUMNS, "value") if valued else ARGUMENT_COLUMNS
    return table(
        columns,
        [(name, *cells, value) if valued else (name, *cells) for name, cells, value in described],
    )


def _tensor_cells(value: Any) -> tuple[object, ...]:
    if not isinstance(value, torch.Tensor):
        return ("",) * (len(ARGUMENT_COLUMNS) - 1)
    strided = value.layout == torch.strided
    return (
        value.device,
        value.dtype,
        value.numel(),
        tuple(value.shape),
        tuple(value.stride()) if strided else "",
        value.requires_grad,
        value.layout,
        value.data_ptr() if strided and value.device.type != "meta" else "",
    )


def _value_cell(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return ""
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
