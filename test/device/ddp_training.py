"""Two processes train with DistributedDataParallel and SyncBatchNorm on backend "nccl"."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn


def work(rank: int, port: int) -> None:
    import torch_dipu  # noqa: F401

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
    parallel = nn.parallel.DistributedDataParallel(model)
    data = torch.randn(8, 4)
    mine = data[rank::2].cuda()
    loss = parallel(mine).square().mean()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()

    parts = [torch.zeros(2, device="cuda") for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), float(rank), device="cuda"))
    total = torch.ones(3, device="cuda") * (rank + 1)
    dist.all_reduce(total)
    sent = torch.arange(2.0, device="cuda") + rank
    dist.broadcast(sent, src=1)
    scattered = torch.zeros(2, device="cuda")
    dist.reduce_scatter_tensor(scattered, torch.ones(4, device="cuda"))
    assert [p.tolist() for p in parts] == [[0, 0], [1, 1]]
    assert total.tolist() == [3, 3, 3] and sent.tolist() == [1, 2]
    assert scattered.tolist() == [2, 2] and total.is_cuda
    dist.barrier()
    if rank == 1:
        os._exit(0)  # without a word to its peer
    try:
        while True:
            dist.all_reduce(total)
    except RuntimeError as error:
        assert "closed by peer" in str(error) or "reset by peer" in str(error), error
        print("a dead peer is named")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    data = torch.randn(8, 4)
    whole(data).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in whole.parameters()])
    torch.testing.assert_close(flat, expected, rtol=1e-4, atol=1e-5)
    print("DDP agrees", flush=True)
    os._exit(0)  # the group cannot be left in order


if __name__ == "__main__":
    mp.spawn(work, args=(int(sys.argv[1]),), nprocs=2)
