"""Two processes of torchrun: torchrun --nproc_per_node 2 torchrun_training.py ddp|fsdp cpu|IMPORT.

Prints the losses: on the CPU in float64 and float32, after IMPORT in float32 on device "cuda".
"""

import importlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ON_CPU = sys.argv[2] == "cpu"
if not ON_CPU:
    importlib.import_module(sys.argv[2])
RANK = int(os.environ["LOCAL_RANK"])
DEVICE = torch.device("cpu") if ON_CPU else torch.device("cuda", RANK)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def wrapped(model: nn.Module) -> nn.Module:
    if sys.argv[1] == "ddp":
        places = None if ON_CPU else [RANK]
        return nn.parallel.DistributedDataParallel(model.to(DEVICE), device_ids=places)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), Block(16), Block(16), nn.Linear(16, 3)).to(dtype)
    parallel = wrapped(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(16, 6).to(dtype), torch.randint(0, 3, (16,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 4, sampler=sampler, pin_memory=not ON_CPU)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(parallel(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total, op=dist.ReduceOp.AVG if not ON_CPU else dist.ReduceOp.SUM)
            losses.append(total.item() / (2 if ON_CPU else 1))
    return losses


def main() -> None:
    if not ON_CPU:
        torch.cuda.set_device(RANK)
    dist.init_process_group("gloo" if ON_CPU else "nccl")
    for dtype in (torch.float64, torch.float32) if ON_CPU else (torch.float32,):
        losses = train(dtype)
        if dist.get_rank() == 0:
            print("LOSSES", *losses, flush=True)
    dist.barrier()
    os._exit(0)  # PyTorch's own exit aborts one of 25 processes of gloo


if __name__ == "__main__":
    main()
