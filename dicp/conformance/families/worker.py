"""A process that judges one family on one backend: `python -m dicp.conformance.families.worker`."""

from __future__ import annotations

import faulthandler
from dataclasses import asdict

import torch

from dicp.conformance.families.adaptation import device_of, judge
from dicp.conformance.families.models import FAMILIES
from dicp.conformance.isolation import task
from dicp.testing.backends import BackendUnderTest


def main() -> None:
    """Judge what stdin names."""
    faulthandler.enable()
    torch.set_num_threads(1)
    job, tell, end = task()
    family = next(family for family in FAMILIES if family.title == job["family"])
    backend = BackendUnderTest(job["backend"], device_of(job["backend"]))
    tell(asdict(judge(family, backend, job["train"])))
    end(True)


if __name__ == "__main__":
    main()
