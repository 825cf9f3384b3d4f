"""Train ResNet-50, or another classifier of torchvision, and compare losses with the CPU's."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import torchvision
import typer
from torch import nn
from torchvision import transforms

from examples import frame, training

VARIABLE, HOLDS = "RESNET50_MODEL_DIR", "one checkpoint: *.safetensors, *.pth or *.pt"
SYNTHETIC_CLASSES = 10


def configured(config: str) -> nn.Module:
    """The classifier of a configuration, by its name or file, of mmpretrain or mmcls."""
    package = next((name for name in ("mmpretrain", "mmcls") if find_spec(name)), "mmpretrain")
    model: nn.Module = import_module(package).get_model(config, pretrained=False)
    return model


def pictures(folder: Path, size: int, batch: int) -> Any:
    """A loader of images in one folder for each class, cut to squares, and the class names."""
    steps = [transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor()]
    normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    try:
        data = torchvision.datasets.ImageFolder(folder, transforms.Compose([*steps, normalize]))
    except FileNotFoundError as error:
        raise frame.ExampleError(f"{error}; {folder} should hold a folder per class") from error
    if len(data) < batch:
        raise frame.ExampleError(f"{folder} holds {len(data)} images, fewer than --batch {batch}")
    loader = torch.utils.data.DataLoader(data, batch, shuffle=True, drop_last=True)
    return loader, data.classes


def main(
    backend: frame.Backend = "cpugraph",
    dynamic: frame.Dynamic = False,
    device: frame.Device = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 4,
    weights: Annotated[Path | None, frame.weights_folder(VARIABLE, HOLDS)] = None,
    compare: frame.Compare = False,
    data: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder per class.")
    ] = None,
    model: Annotated[str, typer.Option(help="A classifier of torchvision.")] = "resnet50",
    config: Annotated[str, typer.Option(help="Or one of mmpretrain or mmcls, installed.")] = "",
    classes: Annotated[int, typer.Option(min=0, help="0: as many as the data has.")] = 0,
    batch: Annotated[int, typer.Option(min=2)] = 4,
    size: Annotated[int, typer.Option(min=32, help="Height and width of images.")] = 64,
    rate: frame.Rate = 0.01,
    seed: frame.Seed = 0,
) -> training.Result:
    """Train a classifier with momentum; prints losses, with --compare beside the CPU's."""
    torch.manual_seed(seed)
    frame.say_random(weights, VARIABLE, HOLDS)
    loader, names = pictures(data, size, batch) if data else (None, range(SYNTHETIC_CLASSES))
    count = classes or len(names)
    # Blocks that start as identities: others amplify rounding a thousand times in each step.
    start = {"zero_init_residual": True} if "resne" in model else {}
    try:
        net = (
            configured(config)
            if config
            else torchvision.models.get_model(model, num_classes=count, **start)
        )
    except ValueError as error:
        raise frame.ExampleError(f"torchvision: {error}; --model wants a classifier") from error
    if weights:
        training.load_state(net, weights, HOLDS)
    batches = (
        training.first(loader, steps)
        if loader
        else training.random_batches(steps, batch, size, count)
    )
    eager = training.train_classifier(net, batches, rate) if compare else None
    compiler = frame.Compiler(backend, dynamic)
    result = training.Result(
        training.train_classifier(net.to(device), batches, rate, compiler), eager
    )
    training.show_losses(result, "eager on the CPU")
    return result
