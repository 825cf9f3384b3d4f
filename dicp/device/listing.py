"""Which path every ATen operator takes on the device: `python -m dicp device ops`."""

from __future__ import annotations

from dataclasses import dataclass

from dicp.device.dispatcher import Dispatcher, draws
from dicp.device.registration import Registered
from dicp.device.schemas import name_of
from dicp.torch_private import OpOverload, dispatches_alone, overloads_of


@dataclass(frozen=True)
class Row:
    """An operator, its path, and the dtypes it takes there."""

    operator: str
    path: str
    dtypes: str


def rows(made: Registered) -> list[Row]:
    """A row for each ATen operator that PyTorch does not take apart before the device sees it."""
    facts = sorted(str(d).removeprefix("torch.") for d in made.dispatcher.target.facts.dtypes)
    of_target, every = ", ".join(facts), "all"
    found = []
    for op in overloads_of("aten"):
        function = _function_of(made.dispatcher, op)
        if not dispatches_alone(op, "CPU") and not function:
            continue
        path = f"operator library: {function}" if function else path_of(made.dispatcher, op)
        dtypes = of_target if path in ("compiled", "library", "decomposed") else every
        dtypes = "the library's" if function else dtypes
        found.append(Row(name_of(op), path, dtypes))
    return sorted(found, key=lambda row: row.operator)


def _function_of(dispatcher: Dispatcher, op: OpOverload) -> str | None:
    """The function of the vendor's library for an operator that is not forced to the CPU."""
    library = dispatcher.operator_library
    if library is None or dispatcher.forced.match(name_of(op)):
        return None
    return library.name_for(op)


def path_of(dispatcher: Dispatcher, op: OpOverload) -> str:
    """The path of an operator without a library, whose arguments the target takes."""
    name = name_of(op)
    if dispatches_alone(op, "PrivateUse1") and not dispatches_alone(op, "CPU"):
        return "native"
    if dispatcher.forced.match(name):
        return "forced to cpu"
    if draws(op):
        return "random state"
    form = dispatcher.functional(op)
    kind = dispatcher.target.rule_kind(form.op) if form is not None else None
    if kind in ("compiled", "library", "view"):
        return str(kind)
    if form is not None and dispatcher.decomposition(form.op) is not None:
        return "decomposed"
    return "cpu"
