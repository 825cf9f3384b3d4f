"""Networks of needle's course learn handwritten digits, with three ways of augmentation.

python -m examples.needle --backend cpugraph
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before packages are imported, whose lack start() explains
    from examples.__main__ import start

    sys.exit(start("needle", sys.argv[1:]))

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from demo.__main__ import Course, draw
from demo.__main__ import Result as Curves
from demo.training import Digits, Learner
from dicp.testing.models.needle_models import MLPResNet, ResNet9
from examples import frame

CLASSES = 10
HOLDS = "cifar-10-batches-py/ (CIFAR-10) or MNIST/raw/ (MNIST)"
OUTPUT = Path(__file__).resolve().parent / "output"


def random_flip(images: Tensor) -> Tensor:
    """Half of the images (N, height, width, channels) flipped from left to right."""
    coins = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(coins, images.flip(2), images)


def random_crop(images: Tensor, padding: int = 1) -> Tensor:
    """Each image moved by up to `padding` points in both directions, zeros around it."""
    count, height, width, _ = images.shape
    padded = F.pad(images, (0, 0, padding, padding, padding, padding))
    places = {"device": images.device}
    shifts = torch.randint(0, 2 * padding + 1, (2, count, 1), **places)
    rows = (torch.arange(height, **places) + shifts[0])[:, :, None]
    columns = (torch.arange(width, **places) + shifts[1])[:, None, :]
    return padded[torch.arange(count, **places)[:, None, None], rows, columns]


AUGMENTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda images: images, "flip": random_flip, "crop": random_crop
}  # fmt: skip


class Augmented(nn.Module):
    """A network whose images are augmented while it trains, in the same graph."""

    def __init__(self, net: nn.Module, augment: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.augment = net, augment

    def forward(self, images: Tensor) -> Tensor:
        return self.net(self.augment(images) if self.training else images)


@dataclass(frozen=True)
class Result:
    """The runs of one augmentation."""

    compiled: Learner
    eager: Learner


def digits(folder: Path | None) -> Digits:
    """scikit-learn's digits, or CIFAR-10 or MNIST of a folder, as images (N, height, width, C)."""
    if folder is None:
        found = Digits.load()
        return Digits(
            found.images.permute(0, 2, 3, 1).contiguous(), found.labels,
            found.test_images.permute(0, 2, 3, 1).contiguous(), found.test_labels,
        )  # fmt: skip
    import torchvision

    for kind in (torchvision.datasets.CIFAR10, torchvision.datasets.MNIST):
        try:
            sets = [kind(folder, train=train) for train in (True, False)]
        except RuntimeError:  # not this data set, or damaged
            continue
        return Digits(*(part for data in sets for part in _tensors(data)))
    raise frame.ExampleError(f"{folder} holds neither data set; expected {HOLDS}")


def _tensors(data: Any) -> tuple[Tensor, Tensor]:
    images = torch.as_tensor(data.data).float() / 127.5 - 1
    return images.view(*images.shape[:3], -1), torch.as_tensor(data.targets)


def main(
    backend: frame.Backend = "cpugraph",
    dynamic: frame.Dynamic = False,
    device: frame.Device = "cpu",
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = 200,
    model: Annotated[Literal["resnet9", "mlp"], typer.Option(help="What learns.")] = "resnet9",
    width: Annotated[int, typer.Option(min=1, help="Channels of the first convolution.")] = 8,
    data: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help=f"A folder with {HOLDS}.")
    ] = None,
    rate: frame.Rate = 1e-3,
    out: Annotated[Path, typer.Option(help="Where the loss curves are drawn.")] = OUTPUT,
    seed: frame.Seed = 0,
) -> dict[str, Result]:
    """Train with each augmentation, eager beside compiled; prints a table and draws the losses."""
    found = digits(data)
    height, columns, channels = found.images.shape[1:]
    compiler = frame.Compiler(backend, dynamic)

    def network() -> nn.Module:
        torch.manual_seed(seed)
        if model == "mlp":
            return nn.Sequential(nn.Flatten(), MLPResNet(height * columns * channels))
        return ResNet9(channels, width, first_stride=4 if height > 16 else 1)

    def learner(name: str, net: nn.Module, forward: Callable[[Tensor], Tensor]) -> Learner:
        made = torch.optim.Adam(net.parameters(), lr=rate, weight_decay=1e-3)
        return Learner(name, net, forward, made)

    results = {}
    epochs = -(-steps // found.steps(1))
    for name, augment in AUGMENTATIONS.items():
        plain = Augmented(network(), augment).to(device)
        other = copy.deepcopy(plain)
        compiled = compiler(other, fallback_random=True)  # eager's draws, to compare with
        pair = learner("compiled", other, compiled), learner("eager", plain, plain)
        for step, batch in enumerate(islice(found.batches(epochs), steps)):
            for each in pair:
                torch.manual_seed(seed + step)
                each.step(*(tensor.to(device) for tensor in batch))
        for each in pair:
            each.test(found.test_images.to(device), found.test_labels.to(device))
        results[name] = Result(*pair)
    report(results)
    curves = [
        Curves(Course(name, network, torch.optim.Adam), result.eager, result.compiled, [])
        for name, result in results.items()
    ]
    draw(curves, out / "needle.png")
    print(f"loss curves: {out / 'needle.png'}")
    return results


def report(results: dict[str, Result]) -> None:
    """Print the last loss, the accuracy and the time of a step, eager beside compiled."""
    rows: list[list[object]] = []
    for name, result in results.items():
        losses = zip(result.compiled.losses, result.eager.losses, strict=True)
        gap = max(abs(a - b) for a, b in losses)
        for each, title, difference in ((result.compiled, name, gap), (result.eager, "", "")):
            accuracy, step = f"{100 * each.accuracy:.1f}%", f"{1e3 * each.step_time:.2f}"
            rows.append([title, each.name, each.losses[-1], difference, accuracy, step])
    columns = ["augmentation", "run", "last loss", "difference", "accuracy", "step, ms"]
    frame.show_table("handwritten digits", columns, rows)
