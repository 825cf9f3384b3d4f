"""Tensors and metadata of GGUF files in torch's terms, through the package `gguf`.

GGUF has its dimensions reversed. Its types have no bool: it stands as Q8_K, one byte an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dicp.errors import GgufFileError, MissingPackageError

VERSION = 3
TYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.bool: "Q8_K",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in TYPES.items()}


def package() -> Any:
    """The module `gguf`. Raises MissingPackageError."""
    try:
        import gguf
    except ImportError as error:
        raise MissingPackageError("gguf", "GGUF case files", "gguf") from error
    return gguf


def add_tensor(writer: Any, name: str, x: Tensor) -> None:
    """Add a tensor to a GGUFWriter, its elements in the order of its dimensions."""
    x = x.detach().cpu().contiguous()
    bits = x.view(torch.int16) if x.dtype == torch.bfloat16 else x  # NumPy has no bfloat16
    raw = package().GGMLQuantizationType[TYPES[x.dtype]]
    writer.add_tensor(name, bits.numpy(), raw_dtype=raw)


def write(writer: Any, path: Path) -> None:
    """Write what a GGUFWriter was given. Raises GgufFileError."""
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as error:
        raise GgufFileError(path, f"it cannot be written: {error}") from error


@dataclass(frozen=True)
class Contents:
    """What a file holds, by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read(path: Path) -> Contents:
    """The contents of a file. Raises GgufFileError and MissingPackageError."""
    base: Any = package().GGUFReader

    class Reader(base):
        """Keeps where tensors lie: the package would count bytes of Q8_K's blocks."""

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            self.places: list[tuple[Any, ...]] = [
                (field.name, [int(n) for n in reversed(field.parts[3])], int(field.parts[4][0]),
                 start_offs + int(field.parts[5][0]))
                for field in fields
            ]  # fmt: skip

    try:
        reader = Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        version = metadata["GGUF.version"]
        if version != VERSION or reader.byte_order != "I":
            raise ValueError(f"it is GGUF version {version}; version {VERSION} is read")
        tensors = {name: _tensor(reader.data, *place) for name, *place in reader.places}
    except (OSError, ValueError, LookupError) as error:
        raise GgufFileError(path, f"it cannot be read: {error}") from error
    return Contents(metadata, tensors)


def _tensor(data: Any, shape: list[int], raw: int, start: int) -> Tensor:
    name = package().GGMLQuantizationType(raw).name
    if name not in _DTYPES:
        raise ValueError(f"a tensor is {name}; there are {', '.join(_DTYPES)}")
    dtype, count = _DTYPES[name], prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    held = bytearray(data[start : start + count * dtype.itemsize])
    if len(held) < count * dtype.itemsize:
        raise ValueError("it ends within a tensor")
    return torch.frombuffer(held, dtype=dtype).reshape(shape)
