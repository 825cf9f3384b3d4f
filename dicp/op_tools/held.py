"""Inputs of calls that wait for their backward: in memory up to a bound, beyond it on disk.

Autograd keeps some inputs itself; those that it does not keep would grow with the model.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dicp.op_tools import storage, trees
from dicp.torch_private import version_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor among arguments."""

    number: int


class HeldInputs:
    """Holds the arguments of calls, with at most `most` bytes of their tensors in memory.

    Parameters do not count, since the program holds them.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._uses: Counter[int] = Counter()
        """How many calls hold a storage, by its address."""
        self._lock = threading.RLock()  # inputs may be collected while the same thread holds it
        self._folder: Path | None = None
        self._files = 0

    def hold(self, args: Any, kwargs: Any, versions: Sequence[int]) -> Held:
        """Keep arguments whose tensors had these versions before the call.

        Raises OSError where the disk is full.
        """
        places: dict[int, _Place] = {}
        tensors: list[torch.Tensor] = []

        def placed(tensor: torch.Tensor) -> _Place:
            tensors.append(tensor)
            return places.setdefault(id(tensor), _Place(len(tensors) - 1))

        arguments = trees.map_tensors((tuple(args), dict(kwargs)), placed)
        changed = list(versions) != versions_of((args, kwargs))
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                 for t in tensors if _counts(t)}  # fmt: skip
        held = Held(arguments, tensors, [version_of(t) for t in tensors], changed)
        with self._lock:
            fresh = sum(size for key, size in sizes.items() if not self._uses[key])
            moves = self.bytes + fresh > self.most and all(map(_can_be_saved, tensors))
            if moves:
                path = self._next_file()
            else:
                self._uses.update(sizes.keys())
                self.bytes += fresh
        if moves:
            held.move_to(path)
            return held
        weakref.finalize(held, self._release, sizes)
        return held

    def _next_file(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="dicp-inputs-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._files += 1
        return self._folder / str(self._files)

    def _release(self, sizes: dict[int, int]) -> None:
        with self._lock:
            for key, size in sizes.items():
                self._uses[key] -= 1
                if not self._uses[key]:
                    del self._uses[key]
                    self.bytes -= size


class Held:
    """The arguments of one call, until they are dropped."""

    def __init__(
        self, arguments: Any, tensors: list[torch.Tensor], versions: list[int], changed: bool
    ) -> None:
        self._arguments = arguments
        self._tensors = tensors
        self._versions = versions
        self._changed = changed
        self._path: Path | None = None

    def move_to(self, path: Path) -> None:
        """Write the tensors, besides parameters, to a file. Raises OSError."""
        written = [t if _counts(t) else None for t in self._tensors]
        storage.save(path, written, {})
        self._tensors = [t for t in self._tensors if not _counts(t)]
        self._versions = [version_of(t) for t in self._tensors]
        self._path = path
        weakref.finalize(self, storage.remove, path)

    def arguments(self) -> Arguments | None:
        """The arguments as they were; None if one was changed in place since."""
        if self._changed or self._versions != [version_of(t) for t in self._tensors]:
            return None
        tensors = list(self._tensors)
        if self._path is not None:
            kept = iter(tensors)
            saved = storage.load(self._path).value
            tensors = [next(kept) if t is None else t for t in saved]
        args, kwargs = trees.mapped(
            self._arguments, lambda leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf
        )
        return args, kwargs


def versions_of(value: Any) -> list[int]:
    """How often the memory of each tensor of a tree was written in place."""
    return [version_of(tensor) for tensor in trees.tensors(value)]


def _counts(tensor: torch.Tensor) -> bool:
    return _can_be_saved(tensor) and not (tensor.is_leaf and tensor.requires_grad)


def _can_be_saved(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    return plain and tensor.device.type != "meta"
