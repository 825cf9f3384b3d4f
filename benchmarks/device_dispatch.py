"""Eager dispatch of small operators on the simulated device beside the CPU's, when warm.

python -m benchmarks.device_dispatch [--number 5000]

Prints microseconds of CPU time of one call on each, the sides taking turns, the ratio, and fails if
a ratio is above the bound of 3.
"""

from __future__ import annotations

import argparse
import time
import timeit

import torch

BOUND = 3.0
WARM, REPEATS = 50, 5
CASES = (
    "a + b", "a * 2.5", "a.relu()", "a.add_(0.0)", "a.sum()", "torch.exp(a)", "a @ w", "a.t()",
    "torch.softmax(a, -1)", "a[0]", "torch.cat([a, b])", "torch.empty(4, device=a.device)",
    "torch.stack([a, b])", "a.zero_()", "a.fill_(2.0)", "torch.ones_like(a)", "a[index]",
    "a.bool().logical_not()", "a.index_add_(0, index, b[:2])", "a.isfinite().all()",
    "functional.pad(a, (1, 1))", "functional.batch_norm(a, b[0], w[0].abs())", "torch.rand_like(a)",
    "functional.one_hot(index, 4)", "(a > 0.5).nonzero()", "torch.arange(8, device=a.device)",
    "torch.equal(a, b)", "functional.scaled_dot_product_attention(q, q, q)",
)  # fmt: skip


def timer_of(case: str, device: str) -> timeit.Timer:
    """A timer of this thread's CPU time, with the case's inputs on `device`, warm."""
    names = {
        "torch": torch,
        "functional": torch.nn.functional,
        "a": torch.randn(8, 8, device=device),
        "b": torch.randn(8, 8, device=device),
        "w": torch.randn(8, 8, device=device),
        "q": torch.randn(1, 2, 8, 8, device=device),
        "index": torch.tensor([1, 3], device=device),
    }
    timer = timeit.Timer(case, timer=time.thread_time, globals=names)
    timer.timeit(WARM)
    return timer


def microseconds(case: str, number: int) -> tuple[float, float]:
    """The best of REPEATS timings of one call, on the CPU and on the device."""
    timers = [timer_of(case, device) for device in ("cpu", "dipu")]
    rounds = [[timer.timeit(number) for timer in timers] for _ in range(REPEATS)]
    host, found = (min(times) / number * 1e6 for times in zip(*rounds, strict=True))
    return host, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=5000)
    number = parser.parse_args().number
    import dicp.device.active  # noqa: F401  registers the device

    torch.set_num_threads(1)
    worst = 0.0
    print(f"{'operator':34}{'device us':>12}{'cpu us':>10}{'ratio':>8}")
    for case in CASES:
        host, found = microseconds(case, number)
        worst = max(worst, found / host)
        print(f"{case:34}{found:12.2f}{host:10.2f}{found / host:8.2f}")
    print(f"worst ratio {worst:.2f}, bound {BOUND}")
    raise SystemExit(worst > BOUND)


if __name__ == "__main__":
    main()
