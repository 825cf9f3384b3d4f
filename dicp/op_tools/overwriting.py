"""Writing back what an operator has overwritten, where it was given stand-ins for its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dicp.op_tools import trees
from dicp.op_tools.names import is_in_place, short_name
from dicp.torch_private import version_of


@dataclass(frozen=True)
class StandIns:
    """The tensors that an operator gets in place of a program's: on another device, in another
    dtype. Inputs that are their own stand-ins are left out."""

    of: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    """By the id of the program's tensor: that tensor and its stand-in."""
    versions: Mapping[int, int]

    @classmethod
    def around(cls, replaced: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> StandIns:
        real = {key: pair for key, pair in replaced.items() if pair[0] is not pair[1]}
        return cls(real, {key: version_of(stand) for key, (_, stand) in real.items()})

    def shown_by(self, result: Any) -> bool:
        """Whether a result is a view of a stand-in, and not the stand-in itself."""
        memory = {_memory(stand) for _, stand in self.of.values()} - {0}
        stands = {id(stand) for _, stand in self.of.values()}
        return any(_memory(t) in memory and id(t) not in stands for t in trees.tensors(result))

    def write_back(self, name: str, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
        """Overwrite the program's tensors whose stand-ins the operator `name` has overwritten.

        args, kwargs: the call's, as the program wrote them. Returns the program's tensor by the id
        of its stand-in, for results that are inputs.
        """
        named = {id(tensor) for tensor in written(name, args, kwargs)}
        # Told before any is written, which changes other views of the same memory.
        changed = [pair for key, pair in self.of.items() if key in named or self._changed(key)]
        for tensor, stand in changed:
            # Autograd goes through what is written; a leaf is only ever written beside it.
            leaf = tensor.is_leaf and tensor.requires_grad
            with torch.set_grad_enabled(torch.is_grad_enabled() and not leaf):
                if tensor.shape != stand.shape:  # `out=` of another size
                    tensor.resize_(stand.shape)
                tensor.copy_(stand)
        return {id(stand): tensor for tensor, stand in self.of.values()}

    def _changed(self, key: int) -> bool:
        """batch_norm writes its running statistics, which neither a name nor a version shows."""
        tensor, stand = self.of[key]
        if version_of(stand) != self.versions[key]:
            return True
        return not stand.requires_grad and not same_values(tensor.to(stand.device), stand)


def _memory(tensor: torch.Tensor) -> int:
    strided = tensor.layout == torch.strided and tensor.device.type != "meta"
    return tensor.untyped_storage().data_ptr() if strided else 0


def same_values(before: Any, after: Any) -> bool:
    """Whether tensors of one shape have the same values, NaN equal to NaN; values of other layouts
    than strided are not looked at, and meta tensors have none."""
    if not isinstance(before, torch.Tensor) or before.layout != torch.strided or before.is_meta:
        return True
    before = before.to(after.dtype)
    kept = before == after
    return bool((kept | ((before != before) & (after != after))).all())


def differentiable_result(name: str, args: Any, result: Any) -> Any:
    """What autograd knows a call's result by: an assignment to elements gives none."""
    return args[0] if short_name(name) == "__setitem__" else result


def written(name: str, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that a call overwrites, by the name of its operator."""
    in_place = is_in_place(name) or kwargs.get("inplace") is True
    if in_place and args:
        yield from trees.tensors(args[0])
    yield from trees.tensors(kwargs.get("out"))
