"""Whether a call drew random numbers: by the states of the generators before and after it.

A name does not tell: attention draws only with dropout, and composite operators draw inside.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dicp.op_tools import trees
from dicp.op_tools.names import is_random_function, is_torch
from dicp.op_tools.storage import present

_UNSEEN = ("cpu", "meta")
"""Kinds of devices without a generator of their own beside the CPU's."""


@dataclass(frozen=True)
class GeneratorStates:
    """The states of the CPU's generator and of those of some devices."""

    cpu: torch.Tensor
    devices: Mapping[torch.device, torch.Tensor]
    unread: bool = False
    """Whether the state of a device cannot be read."""

    @classmethod
    def of(cls, *values: Any) -> GeneratorStates:
        """Those that a computation on the tensors in `values` may draw from."""
        return cls.on({tensor.device for tensor in trees.tensors(values)})

    @classmethod
    def on(cls, devices: Iterable[torch.device]) -> GeneratorStates:
        found, unread = {}, False
        for device in (d for d in devices if d.type not in _UNSEEN):
            try:
                found[device] = torch.get_device_module(device).get_rng_state(device)
            except Exception:  # a plugin without random states, each with an error of its own
                unread = True
        return cls(torch.get_rng_state(), found, unread)

    def now(self) -> GeneratorStates:
        """The states that the same generators have now."""
        return self.on(self.devices)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)

    def drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        now = self.now()
        pairs = [(self.cpu, now.cpu), *((self.devices[d], now.devices[d]) for d in now.devices)]
        return any(not torch.equal(before, after) for before, after in pairs)

    def as_facts(self) -> dict[str, Any]:
        """The states as hexadecimal digits, for a file."""
        devices = {str(device): _digits(state) for device, state in self.devices.items()}
        return {"random_state": _digits(self.cpu), "device_random_states": devices}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> GeneratorStates | None:
        """What `as_facts` gave, of the devices that are here now; None if nothing was drawn."""
        if not facts.get("random_state"):
            return None
        states = {
            torch.device(name): _state(digits)
            for name, digits in facts.get("device_random_states", {}).items()
            if present(name) == name
        }
        return cls(_state(facts["random_state"]), states)


def _digits(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _state(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)


@dataclass(frozen=True)
class Draws:
    """The states, before a call, of the generators that it may draw from."""

    states: GeneratorStates
    given: Sequence[tuple[torch.Generator, torch.Tensor]]
    """Generators among the arguments."""
    shared: Any
    """Those of Python's and NumPy's generators; None for an operator of PyTorch's."""

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
        given = [(leaf, leaf.get_state()) for leaf in leaves if isinstance(leaf, torch.Generator)]
        return cls(GeneratorStates.on(devices), given, shared)

    def has_drawn(self, name: str) -> bool:
        """Whether the call of an operator, over by now, drew random numbers."""
        if self.states.unread and is_random_function(name):
            return True
        if self.shared is not None and self.shared != _shared_states():
            return True
        own = any(not torch.equal(one.get_state(), state) for one, state in self.given)
        return own or self.states.drawn()


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
