"""Captures on disk: `<file>.safetensors` beside `<file>.json`, never a pickle.

Each storage is saved once, cut to the part that the tensors use. The JSON file holds the nesting of
the values, and of each tensor: dtype, shape, strides, the program's offset in its storage and that
in the saved part, its storage, requires_grad, device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dicp.errors import CaptureFormatError
from dicp.machine import device_problem
from dicp.op_tools import trees

FORMAT = 1
_PLAIN = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16,
        torch.int32, torch.int64, torch.uint8, torch.bool,
    }
)  # fmt: skip
"""Dtypes that the format has for certain; others are saved as their bytes."""


@dataclass(frozen=True)
class Saved:
    """A capture that was read: the values, and what the JSON file says besides."""

    value: Any
    facts: Mapping[str, Any]


def save(path: Path, value: Any, facts: Mapping[str, Any], whole: bool = False) -> None:
    """Write `<path>.safetensors` and `<path>.json`. Raises OSError.

    whole: storages are saved as they are, for operators that read beyond the tensors given.
    """
    found = list({id(t): t for t in trees.tensors(value)}.values())
    kept: dict[int, int] = {}
    rows: list[dict[str, Any]] = []
    contents: dict[str, torch.Tensor] = {}
    for storage, members in _by_storage(found).items():
        content, placed = _content(members, whole)
        if content is not None:
            contents[f"storage{storage}"] = content
        for tensor, row in placed:
            kept[id(tensor)] = len(rows)
            rows.append({**row, "storage": f"storage{storage}"})
    plain = {
        "format": FORMAT,
        "torch": torch.__version__,
        **facts,
        "value": _encoded(value, kept),
        "tensors": rows,
    }
    write(path, contents, json.dumps(plain, indent=1))


def add_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write more facts into the JSON file of what was saved. Raises OSError."""
    file = _file(path, ".json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}, indent=1))


def write(path: Path, contents: Mapping[str, torch.Tensor], text: str) -> None:
    """Write both files; all that a capture does to the disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(dict(contents), _file(path, ".safetensors"))
    except SafetensorError as error:  # no OSError, although the disk is full
        raise OSError(str(error)) from error
    _file(path, ".json").write_text(text)


def remove(path: Path) -> None:
    """Delete both files, where they are."""
    for suffix in (".safetensors", ".json"):
        _file(path, suffix).unlink(missing_ok=True)


def load(path: Path, device: str | None = None) -> Saved:
    """Read what `save` wrote under `path`; tensors lie on `device` or, as far as it is there, on
    the one they came from. Raises CaptureFormatError."""
    try:
        plain = json.loads(_file(path, ".json").read_text())
        if plain["format"] != FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, not {FORMAT}")
        loaded = load_file(_file(path, ".safetensors"))
        contents = {name: _aligned(flat) for name, flat in loaded.items()}
        rows = [_tensor(row, contents, device) for row in plain["tensors"]]
        return Saved(_decoded(plain["value"], rows), plain)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise CaptureFormatError(path, f"{type(error).__name__}: {error}") from error
    except Exception as error:  # safetensors has an error class of its own
        raise CaptureFormatError(path, str(error)) from error


def facts_of(path: Path) -> Mapping[str, Any]:
    """What the JSON file of `path` says, empty without one. Raises CaptureFormatError."""
    file = _file(path, ".json")
    try:
        return dict(json.loads(file.read_text())) if file.exists() else {}
    except (OSError, TypeError, ValueError) as error:
        raise CaptureFormatError(path, f"{type(error).__name__}: {error}") from error


def load_legacy(path: Path) -> Any:
    """The value of a `.pth` file of an older tool.

    Raises CaptureFormatError for one that `weights_only=True` refuses.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        reason = str(error).strip().partition(". ")[0].partition("\n")[0]  # no advice to trust it
        raise CaptureFormatError(
            path, f"only what torch.load takes with weights_only=True is read ({reason})"
        ) from error


def _file(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


# ---- tensors -------------------------------------------------------------------------------------


def _by_storage(found: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    numbers: dict[int, int] = {}
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in found:
        key = id(tensor) if not _has_memory(tensor) else tensor.untyped_storage().data_ptr()
        number = numbers.setdefault(key or id(tensor), len(numbers))
        groups.setdefault(number, []).append(tensor)
    return groups


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def _content(
    members: Sequence[torch.Tensor], whole: bool
) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, dict[str, Any]]]]:
    """The part of a storage that its tensors use, flat, and a row for each tensor."""
    placed = []
    if not _has_memory(members[0]):
        return None, [(t, _row(t, 0, f"a {t.layout} tensor on {t.device}")) for t in members]
    dtypes = {t.dtype for t in members}
    dtype = members[0].dtype if len(dtypes) == 1 and dtypes <= _PLAIN else torch.uint8
    spans = [_span(t) for t in members]
    memory = members[0].untyped_storage()
    first, last = min(s[0] for s in spans), max(s[1] for s in spans)
    if whole:
        first, last = 0, memory.nbytes()
    with torch.no_grad():
        flat = torch.empty(0, dtype=dtype, device=members[0].device)
        size = dtype.itemsize
        first -= first % max(t.dtype.itemsize for t in members)
        flat.set_(memory, first // size, ((last - first) // size,))
        content = flat.detach().cpu().clone()
    for tensor in members:
        offset = tensor.storage_offset() - first // tensor.dtype.itemsize
        placed.append((tensor, _row(tensor, offset)))
    return content, placed


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage."""
    start = tensor.storage_offset() * tensor.dtype.itemsize
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    return start, start + extent * tensor.dtype.itemsize


def _row(tensor: torch.Tensor, offset: int, unsaved: str = "") -> dict[str, Any]:
    strided = tensor.layout == torch.strided
    row = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()) if strided else [],
        "storage_offset": tensor.storage_offset() if strided else 0,
        "offset": offset,
        "requires_grad": tensor.requires_grad,
        "device": str(tensor.device),
    }
    bits = {"conj": tensor.is_conj(), "neg": tensor.is_neg()} if strided else {}
    row |= {name: True for name, is_set in bits.items() if is_set}
    return {**row, "unsaved": unsaved} if unsaved else row


_ALIGNMENT = 64
"""Bytes, as PyTorch aligns memory: vector instructions on complex128 crash with 8."""


def _aligned(flat: torch.Tensor) -> torch.Tensor:
    return flat.clone() if flat.untyped_storage().data_ptr() % _ALIGNMENT else flat


def _tensor(
    row: Mapping[str, Any], contents: Mapping[str, torch.Tensor], device: str | None
) -> Any:
    if row.get("unsaved"):
        raise ValueError(f"it holds {row['unsaved']}, which is not saved")
    dtype = _member(row["dtype"], torch.dtype)
    flat = contents[row["storage"]]
    if flat.dtype != dtype:  # bytes, of which the last may belong to a narrower dtype alone
        flat = flat.view(torch.uint8)
        flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    tensor = flat.as_strided(row["shape"], row["stride"], row["offset"])
    tensor = tensor.conj() if row.get("conj") else tensor
    tensor = torch.ops.aten._neg_view(tensor) if row.get("neg") else tensor
    wanted = device or present(row["device"])
    if wanted != "cpu":
        tensor = tensor.to(wanted)
    if row["requires_grad"]:
        tensor = tensor.detach().requires_grad_()
    return tensor


def present(device: str) -> str:
    """The device if this machine has it, else the CPU."""
    return device if device == "cpu" or not device_problem(device) else "cpu"


# ---- other values --------------------------------------------------------------------------------


def _encoded(value: Any, kept: Mapping[int, int]) -> Any:
    match value:
        case torch.Tensor():
            return {"tensor": kept[id(value)]}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case complex():
            return {"complex": [value.real, value.imag]}
        case torch.Size():
            return {"size": list(value)}
        case slice():
            return {"slice": [_encoded(v, kept) for v in (value.start, value.stop, value.step)]}
        case dict():
            return {"dict": [[_encoded(k, kept), _encoded(v, kept)] for k, v in value.items()]}
        case tuple():
            return {"tuple": [_encoded(item, kept) for item in value]}
        case list():
            return [_encoded(item, kept) for item in value]
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
        case torch.Generator():
            return {"generator": value.initial_seed(), "device": str(value.device)}
    if value is Ellipsis:
        return {"ellipsis": True}
    return {"unsaved": f"{type(value).__name__}: {str(value)[:200]}"}


def _decoded(plain: Any, rows: Sequence[torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_decoded(item, rows) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    match plain:
        case {"tensor": number}:
            return rows[number]
        case {"float": text}:
            return float(text)
        case {"complex": [real, imaginary]}:
            return complex(real, imaginary)
        case {"size": sizes}:
            return torch.Size(sizes)
        case {"slice": parts}:
            return slice(*(_decoded(part, rows) for part in parts))
        case {"dict": items}:
            return {_decoded(k, rows): _decoded(v, rows) for k, v in items}
        case {"tuple": items}:
            return tuple(_decoded(item, rows) for item in items)
        case {"torch": name}:
            return _member(name, (torch.dtype, torch.layout, torch.memory_format))
        case {"generator": seed, "device": device}:
            return torch.Generator(present(device)).manual_seed(seed)
        case {"device": name}:
            return torch.device(present(name))
        case {"ellipsis": _}:
            return Ellipsis
    raise ValueError(f"it holds {plain.get('unsaved', plain)}, which is not saved")


def _member(name: str, kinds: type | tuple[type, ...]) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kinds):
        raise ValueError(f"torch.{name} is no value of an argument")
    return value
