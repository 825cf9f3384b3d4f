"""A training step of ResNet-50, eager on the simulated device beside the CPU's, when warm.

python -m benchmarks.device_step [--size 32] [--batch 2] [--rounds 10]

Prints milliseconds of CPU time of a step on each, the sides taking turns, the ratio of the medians,
and fails if it is above the bound of 2 or the losses differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

BOUND = 2.0
WARM = 3


def training_step(device: str, size: int, batch: int) -> Callable[[], float]:
    """A step of SGD on random images, which returns the loss."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet50(num_classes=10, zero_init_residual=True).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(batch, 3, size, size).to(device)
    labels = torch.randint(0, 10, (batch,)).to(device)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    from dicp.testing import torchvision_operators

    torchvision_operators.define()
    import dicp.device.active  # noqa: F401  registers the device

    torch.set_num_threads(1)
    steps = [training_step(device, options.size, options.batch) for device in ("cpu", "dipu")]
    losses = [[step() for _ in range(WARM)] for step in steps]
    spent: list[list[float]] = [[], []]
    for _ in range(options.rounds):
        for step, times in zip(steps, spent, strict=True):
            begin = time.process_time()
            step()
            times.append(time.process_time() - begin)
    host, found = (statistics.median(times) * 1e3 for times in spent)
    agree = abs(losses[0][0] - losses[1][0]) < 1e-4
    print(f"cpu {host:.1f} ms, device {found:.1f} ms, ratio {found / host:.2f}, bound {BOUND}")
    print(f"losses {losses[0]} and {losses[1]}")
    raise SystemExit(found > BOUND * host or not agree)


if __name__ == "__main__":
    main()
