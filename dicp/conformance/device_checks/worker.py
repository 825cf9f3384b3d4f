"""A process that checks a device: `python -m dicp.conformance.device_checks.worker`."""

from __future__ import annotations

import faulthandler
import json
import os
import sys

from dicp.conformance.answers import open_answers, register
from dicp.conformance.device_checks.checks import CHECKS, Device


def main() -> None:
    """Run the checks that stdin does not list as done."""
    faulthandler.enable()
    job = json.load(sys.stdin)
    tell = open_answers()
    register(job["device"])
    device = Device(job["device"])
    for name, check in CHECKS.items():
        if name in job["done"]:
            continue
        tell(began=name)
        try:
            found = check(device)
        except AssertionError as problem:
            tell(name=name, ok=False, detail=str(problem))
        except Exception as error:  # of any library; the other checks go on
            tell(name=name, ok=False, detail=f"{type(error).__name__}: {error}")
        else:
            tell(name=name, ok=True, detail=found)
    tell(end=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # past what libraries do at exit
