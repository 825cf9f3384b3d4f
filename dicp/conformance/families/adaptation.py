"""One family of models on one backend, judged by the fp64 rule: a cell of the adaptation table."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dicp.config import Config
from dicp.conformance.families.models import Family, loss_of
from dicp.target import Target
from dicp.testing.accuracy import Error
from dicp.testing.backends import BackendUnderTest
from dicp.testing.model_errors import inference_errors, training_errors
from dicp.torch_private import pytree

CHARACTERS = 4000
"""Of an error's text that are kept."""


@dataclass(frozen=True)
class Verdict:
    """What came of a family on a backend.

    state: ok, eager (right, with calls left to eager), wrong (an error beyond the rule) or failed.
    eager: operator -> number of calls, in all graphs. largest: the largest error of any tensor as a
    multiple of what the rule allows.
    """

    family: str
    backend: str
    state: str
    detail: str = ""
    eager: Mapping[str, int] = field(default_factory=dict)
    largest: float = 0.0

    @property
    def good(self) -> bool:
        return self.state in ("ok", "eager")

    @property
    def text(self) -> str:
        """The cell: `ok`, `eager n` with the operators, `wrong` or `failed` with the reason."""
        if self.state == "ok":
            return "ok"
        if self.state == "eager":
            listed = (f"{op} {n}x" if n > 1 else op for op, n in sorted(self.eager.items()))
            return f"eager {sum(self.eager.values())}: {', '.join(listed)}"
        lines = (line.strip() for line in self.detail.splitlines())
        return f"{self.state}: {next(filter(None, lines), 'no message')}"


def judge(family: Family, backend: BackendUnderTest, train: bool) -> Verdict:
    """Run a family's inference, and with `train` a training step, compiled and in eager."""
    backend.start_over()
    torch.manual_seed(0)
    try:
        found = _errors(family, backend, train)
    except AssertionError as difference:  # shapes, dtypes or integers are not those of eager
        return Verdict(family.title, backend.name, "wrong", str(difference)[:CHARACTERS])
    except Exception as error:  # of any library; the other families go on
        text = f"{type(error).__name__}: {error}"[:CHARACTERS]
        return Verdict(family.title, backend.name, "failed", text)
    wrong = [error for error in found if not error.ok]
    largest = max((error.excess for error in found), default=0.0)
    nodes = [node for report in backend.reports() for node in report.nodes]
    eager = dict(Counter(str(node.op) for node in nodes if node.decision == "eager"))
    state = "wrong" if wrong else "eager" if eager else "ok"
    return Verdict(family.title, backend.name, state, _worded(wrong), eager, largest)


def _worded(wrong: Sequence[Error]) -> str:
    if not wrong:
        return ""
    most = max(error.error for error in wrong)
    tensors = len({error.name for error in wrong})
    return f"largest error {most:.1e} in {tensors} tensors, first {wrong[0]}"


def _errors(family: Family, backend: BackendUnderTest, train: bool) -> list[Error]:
    def put(batch: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to(backend.device), batch)

    def compiled(fn: Any) -> Any:
        return torch.compile(fn, backend=backend.inner, dynamic=False, fullgraph=True)

    model = family.model().eval().to(backend.device)
    double = copy.deepcopy(model).double()
    found = inference_errors(model, double, compiled(model), put(family.batch()))
    if train:
        model.train()
        found += training_errors(model, loss_of, compiled(loss_of), [put(family.labelled())])
    return found


def device_of(backend: str) -> str:
    """Where the tensors of a backend's models lie: on its target's device if there is one."""
    target = BackendUnderTest(backend).target
    return "cpu" if target is None or _simulated(target) else target.device_type


def runs_on(backend: BackendUnderTest) -> str:
    """`device` or `simulator`; empty for a backend of others."""
    if backend.target is None:
        return ""
    return "simulator" if _simulated(backend.target) else "device"


def _simulated(target: Target) -> bool:
    return target.simulated(Config.from_env(vendor=target.options))
