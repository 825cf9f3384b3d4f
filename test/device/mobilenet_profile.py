"""MobileNet-V2 in several processes, profiled: torchrun --nproc_per_node 2 mobilenet_profile.py

Prints what a training step costs with `torch.backends.cudnn.enabled` on and off, in milliseconds,
and the operators of the profiles that differ between the two.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, schedule

import ditorch  # noqa: F401
from dicp.testing import torchvision_operators

torchvision_operators.define()
import torchvision  # noqa: E402

RANK = int(os.environ["LOCAL_RANK"])
ROUNDS, WARM, STEPS = 4, 1, 4


def main() -> None:
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl")  # this device's `dicl`
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2(num_classes=10).cuda()
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[RANK])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(4, 3, 32, 32).cuda()
    labels = torch.randint(0, 10, (4,)).cuda()

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(parallel(images), labels).backward()
        optimizer.step()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)

    for _ in range(2):
        step()  # compiles the operators
    times: dict[bool, list[float]] = {True: [], False: []}
    calls: dict[bool, dict[str, int]] = {}
    for number in range(ROUNDS):
        for enabled in (True, False) if number % 2 else (False, True):
            torch.backends.cudnn.enabled = enabled
            plan = schedule(wait=0, warmup=WARM, active=STEPS, repeat=1)
            with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiled:
                for done in range(WARM + STEPS):
                    took = step()
                    if done >= WARM:
                        times[enabled].append(took)
                    profiled.step()
            rows = profiled.key_averages()
            calls[enabled] = {row.key: row.count for row in rows if row.key.startswith("aten::")}
    if RANK == 0:
        on, off = (statistics.median(times[enabled]) for enabled in (True, False))
        differ = sorted(k for k in calls[True] | calls[False]
                        if calls[True].get(k) != calls[False].get(k))  # fmt: skip
        names = [name.removeprefix("aten::") for name in differ]
        convolutions = calls[True]["aten::convolution"]
        print(f"STEP on {on:.0f} ms off {off:.0f} ms convolutions {convolutions}", flush=True)
        print("DIFFERENT", *names, flush=True)
    dist.barrier()
    os._exit(0)  # PyTorch's own exit aborts one of 25 processes of gloo


if __name__ == "__main__":
    main()
