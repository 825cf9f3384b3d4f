"""OpObserve: prints arguments, results and gradients."""

from __future__ import annotations

from typing import Any

from dicp.op_tools.capture import argument_rows, gradient_rows, result_rows
from dicp.op_tools.frame import Call, Feature, Proceed
from dicp.op_tools.gradients import Gradients, InputEdges, watch


class OpObserve(Feature):
    """Prints the argument table of inputs, outputs and gradients of each call."""

    feature = "dump_op_args"
    hook = "OpObserveHook"
    variable = "OBSERVE"

    def around(self, call: Call, proceed: Proceed) -> Any:
        rows = argument_rows(call)
        edges = InputEdges.of(call.args, call.kwargs, call.name)
        result = proceed(call)
        self.say_arguments(call, [*rows, *result_rows(call.name, result)])

        def backward(found: Gradients) -> None:
            self.say_arguments(call, gradient_rows(call.name, found), "backward")

        watch(edges, result, backward)
        return result
