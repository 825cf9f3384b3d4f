"""Eager dispatch of small operators on the simulated device beside the CPU's, when warm.

python -m benchmarks.device_dispatch [--number 5000]

Prints microseconds of one call on each, the ratio, and fails if a ratio is above the bound of 3.
"""

from __future__ import annotations

import argparse
import timeit

import torch

BOUND = 3.0
WARM, REPEATS = 50, 5
CASES = (
    "a + b", "a * 2.5", "a.relu()", "a.add_(0.0)", "a.sum()", "torch.exp(a)", "a @ w", "a.t()",
    "torch.softmax(a, -1)", "a[0]", "torch.cat([a, b])", "torch.empty(4, device=a.device)",
)  # fmt: skip


def microseconds(case: str, device: str, number: int) -> float:
    """The best of REPEATS timings of one call."""
    names = {
        "torch": torch,
        "a": torch.randn(8, 8, device=device),
        "b": torch.randn(8, 8, device=device),
        "w": torch.randn(8, 8, device=device),
    }
    timer = timeit.Timer(case, globals=names)
    timer.timeit(WARM)
    return min(timer.repeat(REPEATS, number)) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=5000)
    number = parser.parse_args().number
    import dicp.device.active  # noqa: F401  registers the device

    torch.set_num_threads(1)
    worst = 0.0
    print(f"{'operator':34}{'device us':>12}{'cpu us':>10}{'ratio':>8}")
    for case in CASES:
        host = microseconds(case, "cpu", number)
        found = microseconds(case, "dipu", number)
        worst = max(worst, found / host)
        print(f"{case:34}{found:12.2f}{host:10.2f}{found / host:8.2f}")
    print(f"worst ratio {worst:.2f}, bound {BOUND}")
    raise SystemExit(worst > BOUND)


if __name__ == "__main__":
    main()
