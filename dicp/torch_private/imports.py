"""What waits until the program imports Dynamo, which takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

import torch

DYNAMO: Final = "torch._dynamo"


class AfterDynamo(MetaPathFinder):
    """Calls `action` once Dynamo is imported: at once if it is, else when the program does."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        if DYNAMO in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Do not wait any longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != DYNAMO:
            return None
        self.cancel()
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute, action = loader.exec_module, self._action

        def execute_and_act(module: Any) -> None:
            execute(module)
            action()

        loader.exec_module = execute_and_act
        return spec


def traced_device_attributes(
    shown: Callable[[torch.device], torch.device], moved: Callable[[torch.device], bool]
) -> tuple[type, dict[str, Callable[..., Any]]]:
    """Dynamo's class of traced tensors, and its methods that answer `.device` and `.is_cuda`.

    The device is `shown(device)`, and `is_cuda` is `moved(device)`.

    Dynamo has to be imported.
    """
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import VariableTracker

    def device(self: TensorVariable, tx: Any) -> VariableTracker | None:
        return None if self.device is None else VariableTracker.build(tx, shown(self.device))

    def is_cuda(self: TensorVariable, tx: Any) -> VariableTracker | None:
        return None if self.device is None else VariableTracker.build(tx, moved(self.device))

    return TensorVariable, {"method_attr_device": device, "method_attr_is_cuda": is_cuda}


def methods_in_graphs(method: Any) -> tuple[ModuleType, str, Callable[[], frozenset[Any]]]:
    """The module and the name of the function that lists the methods of tensors which Dynamo puts
    into graphs, and one that lists `method` too, whose name leads to another function.

    Dynamo has to be imported.
    """
    from torch._dynamo import trace_rules

    listed = trace_rules.get_tensor_method.__wrapped__
    return trace_rules, "get_tensor_method", cache(lambda: listed() | {method})
