"""Whether a call drew random numbers: by the states of the generators before and after it.

A name does not tell: attention draws only with dropout, and composite operators draw inside.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dicp.op_tools import trees
from dicp.op_tools.names import is_random_function, is_torch

_UNSEEN = ("cpu", "meta")
"""Kinds of devices without a generator of their own beside the CPU's."""


@dataclass(frozen=True)
class Draws:
    """The states, before a call, of the generators that it may draw from."""

    states: Sequence[tuple[Callable[[], torch.Tensor], torch.Tensor]]
    shared: Any
    """Those of Python's and NumPy's generators; None for an operator of PyTorch's."""
    complete: bool
    """Whether all generators' states can be read."""

    @classmethod
    def of(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draws:
        shared = _shared_states(func)
        leaves: list[Any] = []
        trees.mapped((tuple(args), dict(kwargs)), leaves.append)
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        devices.add(torch.get_default_device())
        devices |= {leaf for leaf in leaves if isinstance(leaf, torch.device)}
        if isinstance(kwargs.get("device"), (str, int)):
            devices.add(torch.device(kwargs["device"]))
        readers: list[Callable[[], torch.Tensor]] = [torch.get_rng_state]
        readers += [leaf.get_state for leaf in leaves if isinstance(leaf, torch.Generator)]
        try:
            for device in (d for d in devices if d.type not in _UNSEEN):
                readers.append(partial(torch.get_device_module(device).get_rng_state, device))
            return cls([(read, read()) for read in readers], shared, complete=True)
        except Exception:  # a plugin without random states, each with an error of its own
            own = (torch.get_rng_state, torch.get_rng_state())
            return cls([own], shared, complete=False)

    def has_drawn(self, name: str) -> bool:
        """Whether the call of an operator, over by now, drew random numbers."""
        if not self.complete and is_random_function(name):
            return True
        if self.shared is not None and self.shared != _shared_states():
            return True
        return any(not torch.equal(read(), state) for read, state in self.states)

    @property
    def cpu_state(self) -> str:
        """The state of the CPU's generator before the call, as hexadecimal digits."""
        return bytes(self.states[0][1].numpy()).hex()


@contextmanager
def draws_undone(func: Callable[..., Any]) -> Iterator[None]:
    """Within, what `func` draws from the generators that programs share is drawn again later."""
    state, shared = torch.get_rng_state(), _shared_states(func)
    try:
        yield
    finally:
        if not torch.equal(torch.get_rng_state(), state):
            torch.set_rng_state(state)
        if shared is not None and shared != _shared_states():
            random.setstate(shared[0])
            kind, keys, others = shared[1:]
            np.random.set_state((kind, np.frombuffer(keys, np.uint32), *others))


def _shared_states(func: Callable[..., Any] | None = None) -> Any:
    if func is not None and is_torch(func):
        return None
    state: Any = np.random.get_state()
    kind, keys, *others = state
    return random.getstate(), kind, bytes(keys), others
