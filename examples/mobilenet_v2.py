"""Training steps of MobileNet-V2 on one process or several, which share each batch (DDP)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import torch.distributed as dist
import torchvision
import typer
from torch import Tensor, nn

from dicp.errors.command_line import above_zero
from examples import frame, training
from examples.training import Result, Run

VARIABLE, HOLDS = "MOBILENET_V2_MODEL_DIR", "one checkpoint: *.safetensors, *.pth or *.pt"


@dataclass(frozen=True)
class Plan:
    """What a process trains; the batch is that of all processes together."""

    compiler: frame.Compiler
    device: str
    steps: int
    weights: Path | None
    compare: bool
    processes: int
    batch: int
    size: int
    classes: int
    width: float
    rate: float
    seed: int


def train(plan: Plan, rank: int) -> Result:
    """The runs of one of the processes."""
    torch.manual_seed(plan.seed)
    model = torchvision.models.mobilenet_v2(num_classes=plan.classes, width_mult=plan.width,
                                            dropout=0.0)  # fmt: skip
    if plan.weights:
        training.load_state(model, plan.weights, HOLDS)
    whole = training.random_batches(plan.steps, plan.batch, plan.size, plan.classes)
    batches = [(i[rank :: plan.processes], c[rank :: plan.processes]) for i, c in whole]
    device = f"{plan.device}:{rank}" if plan.processes > 1 and plan.device != "cpu" else plan.device
    model.to(device)
    wrap = nn.parallel.DistributedDataParallel if plan.processes > 1 else None
    runs = [
        training.train_classifier(model, batches, plan.rate, compiler, wrap)
        for compiler in (plan.compiler, *([None] if plan.compare else []))
    ]
    return Result(*runs)


def work(rank: int, plan: Plan, folder: Path) -> None:
    """One of several processes; the first writes the losses, their means over all processes."""
    kind = "gloo" if plan.device == "cpu" else "nccl"
    dist.init_process_group(
        kind, init_method=f"file://{folder}/store", rank=rank, world_size=plan.processes
    )
    result = train(plan, rank)
    runs = [run for run in (result.compiled, result.eager) if run]
    losses: Tensor = torch.tensor([run.losses for run in runs], dtype=torch.float64)
    if kind == "nccl":
        losses = losses.to(f"{plan.device}:{rank}")
    dist.all_reduce(losses)
    means = (losses / plan.processes).tolist()
    if rank == 0:
        found = [asdict(Run(mean, run.seconds)) for mean, run in zip(means, runs, strict=True)]
        (folder / "runs.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(
    backend: frame.Backend = "cpugraph",
    dynamic: frame.Dynamic = False,
    device: frame.Device = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 4,
    weights: Annotated[Path | None, frame.weights_folder(VARIABLE, HOLDS)] = None,
    compare: frame.Compare = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share a batch.")] = 1,
    batch: Annotated[int, typer.Option(min=2, help="Images of all processes together.")] = 8,
    size: Annotated[int, typer.Option(min=32, help="Height and width of images.")] = 64,
    classes: Annotated[int, typer.Option(min=2)] = 10,
    width: Annotated[
        float, typer.Option(callback=above_zero, help="Multiplies the numbers of channels.")
    ] = 1.0,
    rate: frame.Rate = 0.01,
    seed: frame.Seed = 0,
) -> Result:
    """Train MobileNet-V2 with momentum; prints losses, with --compare beside eager's."""
    if batch < 2 * processes:
        raise frame.ExampleError(
            f"batch normalization needs two images of each process: --batch {2 * processes} or more"
        )
    frame.say_random(weights, VARIABLE, HOLDS)
    plan = Plan(frame.Compiler(backend, dynamic), device, steps, weights, compare, processes,
                batch, size, classes, width, rate, seed)  # fmt: skip
    if processes == 1:
        result = train(plan, 0)
    else:
        with TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(work, (plan, Path(folder)), processes)
            runs = json.loads((Path(folder) / "runs.json").read_text())
            result = Result(*(Run(**run) for run in runs))
    training.show_losses(result)
    return result
