"""Collectives of `torch.distributed`: what they write, and when they are over.

They return nothing or a handle, and write their results into tensors that they are given.
"""

from __future__ import annotations

import inspect
from typing import Any

from dicp.op_tools.frame import Call

_PREFIX = "torch.distributed."
_RESULTS = {
    name: result
    for names, result in (
        ("all_reduce broadcast reduce recv scatter", "tensor"),
        ("all_gather", "tensor_list"),
        ("all_gather_into_tensor all_gather_single", "output_tensor"),
        ("reduce_scatter reduce_scatter_tensor reduce_scatter_single all_to_all_single", "output"),
        ("all_to_all", "output_tensor_list"),
        ("gather", "gather_list"),
        ("all_reduce_coalesced", "tensors"),
        ("all_gather_coalesced", "output_tensor_lists"),
        ("all_gather_object broadcast_object_list recv_object_list", "object_list"),
        ("gather_object", "object_gather_list"),
        ("scatter_object_list", "scatter_object_output_list"),
    )
    for name in names.split()
}
"""The parameter that holds a collective's results."""

_POINT_TO_POINT = ("isend", "irecv")
"""Waiting for one where it is issued could wait for a peer that waits likewise."""


def outputs_of(call: Call, result: Any) -> Any:
    """The outputs of a call: what it returned, or what a collective wrote once it is over."""
    name = call.name.removeprefix(_PREFIX)
    if name == call.name:
        return result
    wait_for(call, result)
    parameter = _RESULTS.get(name)
    if parameter is None:
        return None if hasattr(result, "wait") else result
    return inspect.signature(call.operator).bind(*call.args, **call.kwargs).arguments.get(parameter)


def wait_for(call: Call, result: Any) -> None:
    """Wait for an asynchronous collective."""
    name = call.name.removeprefix(_PREFIX)
    if name != call.name and name not in _POINT_TO_POINT and hasattr(result, "wait"):
        result.wait()
