"""Kernels for a device, in the variants that launches need."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.cache import Cache
from dicp.config import Config
from dicp.gpu.build import Binary, Job
from dicp.gpu.launch import LaunchPlan
from dicp.vendor.maca.facts import MIN_WAVE
from dicp.vendor.maca.toolchain import defines_of, device_compiler, driver_api
from dicp.vendor.maca.units import Units


class Plan(LaunchPlan[Job]):
    """The launch plan of a program."""

    job_type = Job


class Builder:
    """Compiled kernels by job: from the cache, or from the device's compiler."""

    def __init__(self, cache: Cache, config: Config) -> None:
        self.cache = cache
        self.config = config
        self.lanes = driver_api(config).lanes

    def build(self, jobs: Sequence[Job]) -> list[Binary]:
        found: dict[tuple[str, tuple[str, ...]], Binary] = {}
        wanted: dict[tuple[str, ...], dict[str, Job]] = {}
        for job in jobs:
            wanted.setdefault(defines_of(job.variant), {})[job.name] = job
        for defines, of_name in wanted.items():
            units = Units(device_compiler(self.config, defines), self.cache, self.config.jobs)
            bodies = {name: job.body for name, job in of_name.items()}
            keys = units.build(bodies, {name: job.origins for name, job in of_name.items()})
            for name, job in of_name.items():
                warps = job.launch["warps"] * MIN_WAVE // self.lanes
                code = units.content(keys[name])
                found[name, defines] = Binary(code, name, 0, warps, job.blocks())
        return [found[job.name, defines_of(job.variant)] for job in jobs]
