"""Generated code depends on the program alone: not on addresses, nor on the order of sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_recorder import Recorder as AscendRecorder
from recorder import MacaRecorder, Recorder, Recording, TritonRecorder, record
from torch import Tensor

from dicp.config import Config
from dicp.vendor.tops import TopsTarget


class TopsRecorder(Recording, TopsTarget):
    """The HLIR programs."""


RECORDERS: list[type[Recording]] = [
    Recorder, TritonRecorder, MacaRecorder, AscendRecorder, TopsRecorder,
]  # fmt: skip


def pick(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return x[i, j] + x[j, :, i]


def put(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return x.index_put((i, j), x[i, j] * 2, accumulate=True)


def normalize(x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
    y = F.layer_norm(x @ x.transpose(1, 2), (4,)).softmax(-1)
    return F.max_pool2d(y[None], 2), y.cumsum(0), y.var(1), F.gelu(y).argmax(-1)


def rendered(
    recorder: type[Recording], *functions: Callable[..., Any], dynamic: bool = True
) -> list[Any]:
    """The files of source text, of forward and backward graphs."""
    torch.manual_seed(0)
    x = torch.rand(4, 4, 4, requires_grad=True)
    i, j = torch.arange(3), torch.arange(1, 4)
    found = []
    for fn in functions:
        target = recorder()
        record(fn, x, i, j, dynamic=dynamic, target=target)
        assert target.programs
        found += [sorted(target.render(p, Config()).files.items()) for p in target.programs]
    return found


def sample() -> list[Any]:
    found = rendered(Recorder, pick, put, normalize)
    for recorder in RECORDERS[1:]:
        found += rendered(recorder, pick, normalize, dynamic=False)
    return found


@pytest.mark.parametrize("recorder", RECORDERS)
def test_addresses_do_not_reach_the_code(recorder: type[Recording]) -> None:
    first = rendered(recorder, pick, dynamic=False)
    taken = []
    for count in (1, 77, 1000):  # objects fall on other addresses
        taken.append([torch.Size([k]) for k in range(count)])
        assert rendered(recorder, pick, dynamic=False) == first


@pytest.mark.sweep
def test_the_order_of_sets_does_not_reach_the_code() -> None:
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__))]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as other:
        ours = json.dumps(sample())
        theirs, _ = other.communicate(timeout=240)
    assert json.loads(theirs) == json.loads(ours)


if __name__ == "__main__":
    json.dump(sample(), sys.stdout)
