"""`utest`: checks of a device beside its operators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from dicp.conformance.device_checks.checks import CHECKS
from dicp.conformance.isolation import run_module
from dicp.conformance.names import EAGER_DEVICE
from dicp.errors.command_line import seconds_above_zero

WORKER = "dicp.conformance.device_checks.worker"


@dataclass(frozen=True)
class Checked:
    """The result of a check: what it found, or what is wrong."""

    name: str
    ok: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'FAILED':8}{self.name}: {self.detail}"


def utest(
    device: Annotated[str, typer.Option(help="The type of the device.")] = EAGER_DEVICE,
    seconds: Annotated[
        float, typer.Option(callback=seconds_above_zero, help="Checks that take longer hang.")
    ] = 900.0,
) -> None:
    """Check a device: count and properties, error texts, streams and events, memory, reuse.

    Fails if a check fails, or ends the process it runs in.
    """
    _check_device(device)
    good = True
    for one in checked(device, seconds):
        sys.stdout.write(f"{one}\n")
        sys.stdout.flush()
        good &= one.ok
    raise typer.Exit(0 if good else 1)


def checked(device: str, seconds: float, **variables: str) -> Iterator[Checked]:
    """Every check's result; after one that ends its process, the others run in a new one."""
    done: list[str] = []
    while len(done) < len(CHECKS):
        job = {"device": device, "done": done}
        ended = run_module(WORKER, job, seconds, DIPU_MOCK_CUDA="false", **variables)
        found = [Checked(**one) for one in ended.told if "name" in one]
        yield from found
        done += [one.name for one in found]
        running = [one["began"] for one in ended.told if one.get("began") not in (None, *done)]
        left = [name for name in CHECKS if name not in done]
        for name in running or left:  # without any that ran, a new process would die as well
            done.append(name)
            yield Checked(name, False, ended.how)


def _check_device(device: str) -> None:
    """Raises BadParameter for a device that is not there."""
    if device == EAGER_DEVICE:  # the processes register it
        return
    try:
        available = torch.get_device_module(device).is_available()
    except (RuntimeError, AttributeError) as unknown:
        problem = (str(unknown).splitlines() or [device])[0]
        raise typer.BadParameter(problem, param_hint="--device") from unknown
    if not available or device == "cpu":
        raise typer.BadParameter(f"there is no device {device!r}", param_hint="--device")
