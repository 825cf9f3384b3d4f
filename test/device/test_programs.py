"""Programs written for CUDA, unchanged on the device."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _losses(text: str) -> tuple[list[float], str]:
    line = next(line for line in text.splitlines() if line.startswith("LOSSES"))
    *losses, same = line.split()[1:]
    return [float(loss) for loss in losses], same


def test_training_of_a_transformer(run: Any) -> None:
    """Loader with pinned memory, autocast, GradScaler, clipping, checkpoint; ditorch's one line."""
    program = HERE / "cuda_training.py"
    expected, _ = _losses(run(program, "cpu").stdout)
    done = run(program, "ditorch")
    found, same = _losses(done.stdout)
    assert found == pytest.approx(expected, rel=2e-2) and same == "True"
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert "ditorch: simulated torch_dipu:" in done.stdout


def test_two_processes(run: Any) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    assert "DDP agrees" in run(HERE / "ddp_training.py", str(port)).stdout
