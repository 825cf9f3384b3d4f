"""A profile of two convolutions' inference on the eager device: python docs/profile_device.py"""

from __future__ import annotations

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import torch_dipu  # noqa: F401

model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Softmax(1)
).to("dipu")
images = torch.randn(2, 3, 32, 32).to("dipu")
activities = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
with torch.no_grad():
    for _ in range(2):
        model(images)  # compiles the operators
    with profile(activities=activities, record_shapes=True) as profiled:
        model(images)
        torch.accelerator.synchronize()
rows = profiled.key_averages()
on_device = [row for row in rows if row.key.endswith(" (simulated dipu:0)")]
for row in sorted(on_device, key=lambda row: -row.self_device_time_total)[:4]:
    print(f"device {row.self_device_time_total:6.0f} us  {row.count} calls  {row.key}")
launches = [row for row in rows if row.key.startswith("LaunchKernel_")]
for row in sorted(launches, key=lambda row: -row.self_cpu_time_total)[:4]:
    print(f"host   {row.self_cpu_time_total:6.0f} us  {row.count} calls  {row.key}")
