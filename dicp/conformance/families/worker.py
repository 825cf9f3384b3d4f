"""A process that judges one family on one backend: `python -m dicp.conformance.families.worker`."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import asdict

import torch

from dicp.conformance.answers import open_answers
from dicp.conformance.families.adaptation import device_of, judge
from dicp.conformance.families.models import FAMILIES
from dicp.testing.backends import BackendUnderTest


def main() -> None:
    """Judge what stdin names."""
    faulthandler.enable()
    torch.set_num_threads(1)
    job = json.load(sys.stdin)
    tell = open_answers()
    family = next(family for family in FAMILIES if family.title == job["family"])
    backend = BackendUnderTest(job["backend"], device_of(job["backend"]))
    tell(**asdict(judge(family, backend, job["train"])))
    tell(end=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # past what libraries do at exit
