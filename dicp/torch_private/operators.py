"""Registered operators: their schemas, overloads and kernels, as the dispatcher knows them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import torch
from torch._decomp import decomposition_table as all_decompositions
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from dicp.torch_private.releases import release_of

DECOMPOSED_BY_WRITING: Final[frozenset[OpOverload]] = (
    frozenset({torch.ops.aten.index_fill.int_Scalar, torch.ops.aten.index_fill.int_Tensor})
    if release_of(torch.__version__) < (2, 13)
    else frozenset()
)
"""Operators whose decomposition in this release copies into a fresh tensor: AOTAutograd does not
recognize that as functional and rejects it."""

ATTENTION_FORWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Attention with any mask and with grouped heads: (q, k, v, dropout_p, is_causal, attn_mask, scale)
to the result and the log-sum-exp of the rows. Its kernels are the host's; graphs for any device may
carry it."""
ATTENTION_BACKWARD: Final = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)

_ORIGINAL: Final = "_dicp_original"
grouped_mm = torch._grouped_mm
pad: Final = torch._C._nn.pad
"""What torch.nn.functional.pad calls."""


def flex_attention_by_definition(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the higher-order operator `flex_attention` computes in eager, by ordinary operators."""
    from torch._higher_order_ops.flex_attention import math_attention  # Dynamo has imported it

    return math_attention(*args)


def schema_of(op: Any) -> Any:
    """The schema of an operator: name, arguments with types and alias annotations, returns.

    None for a callable without one, such as a higher-order operator.
    """
    return getattr(op, "_schema", None)


def overload_name(op: OpOverload) -> str:
    """The name of an overload among those of its operator: `Tensor` for `add.Tensor`."""
    return op._overloadname


def is_composite(op: OpOverload) -> bool:
    """Whether PyTorch computes the operator by other operators, whatever the backend."""
    return op._can_decompose()


def dispatches_alone(op: OpOverload, key: str) -> bool:
    """Whether `op` has a kernel of its own for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def registered_names() -> Iterator[tuple[str, str, str]]:
    """Namespace, packet and overload ("" for the default one) of every registered operator."""
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        yield space, packet, overload


def overloads_of(namespace: str) -> Iterator[OpOverload]:
    """Every operator overload registered under `namespace` that Python can call, by name."""
    for space, name, overload in sorted(registered_names()):
        if space == namespace:
            packet = getattr(getattr(torch.ops, space), name, None)
            op = getattr(packet, overload or "default", None)
            if isinstance(op, OpOverload):
                yield op


@cache
def twin_of(op: OpOverload) -> OpOverload:
    """An object that works as `op` and is equal to no other operator."""
    twin = object.__new__(type(op))
    twin.__dict__ |= {**op.__dict__, _ORIGINAL: op}
    return twin


def original_of(op: Any) -> Any:
    """The operator that `op` is a twin of, or `op` itself."""
    return getattr(op, "__dict__", {}).get(_ORIGINAL, op)


def fills_uninitialized() -> bool:
    """Whether deterministic algorithms fill memory that has no values yet."""
    return bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]
