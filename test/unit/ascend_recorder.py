"""An Ascend target that lowers and renders, and builds nothing: graphs run operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import recorder
from recorder import Recording

from dicp.config import Config
from dicp.graphop.program import Node
from dicp.vendor.ascend import AscendTarget
from dicp.vendor.ascend.probe import EVERY_OPERATOR, Installed


class Recorder(Recording, AscendTarget):
    """The GE programs, by default of an installation with all operators."""

    def __init__(self, operators: Installed = EVERY_OPERATOR) -> None:
        super().__init__()
        self._operators = operators

    def installed(self, config: Config) -> Installed:
        return self._operators

    def sources(self) -> list[str]:
        return [t for p in self.programs for t in self.render(p, Config()).files.values()]

    def operators(self) -> Iterator[Node]:
        """GE operators of all graphs."""
        return (n for p in self.programs for g in p.graphs for n in g.operators)

    def kinds(self) -> Counter[str]:
        """How many GE operators of each kind all graphs have."""
        return Counter(node.kind for node in self.operators())


def record(
    fn: Callable[..., Any], *inputs: Any, dynamic: bool = False,
    operators: Installed = EVERY_OPERATOR, **options: Any,
) -> Recorder:  # fmt: skip
    """Compile `fn` for `inputs` (backward too, where an input requires a gradient)."""
    target = Recorder(operators)
    recorder.record(fn, *inputs, dynamic=dynamic, target=target, **options)
    return target
