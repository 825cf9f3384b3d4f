"""Marks that PyTorch reads and writes on the nodes of a captured graph, and tracing of one."""

from __future__ import annotations

import sys

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from dicp.torch_private.operators import OpOverload


def recompute_in_backward(node: fx.Node) -> None:
    """Ask the partitioner to compute `node` again in backward and not to save it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def do_not_recompute(node: fx.Node) -> None:
    """Have the partitioner save `node`, or results of it, unless the program marked it."""
    node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def saved_for_backward(node: fx.Node) -> None:
    """Let the partitioner decide whether `node` is recomputed, whatever the program asked."""
    node.meta.pop("recompute", None)


def is_backward(node: fx.Node) -> bool:
    """Whether a captured node computes gradients, rather than the user's functions."""
    return bool(node.meta.get("autograd_backward"))


def traced_from(node: fx.Node) -> OpOverload | None:
    """The operator that was decomposed into `node` and others; the node's own if none was."""
    original = node.meta.get("original_aten")
    return original if isinstance(original, OpOverload) else None


def is_tracing_error(error: Exception) -> bool:
    """Whether Dynamo raised it; where nothing has imported Dynamo, it did not."""
    module = sys.modules.get("torch._dynamo.exc")
    return module is not None and isinstance(error, module.TorchDynamoException)
