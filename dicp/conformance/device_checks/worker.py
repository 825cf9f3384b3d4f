"""A process that checks a device: `python -m dicp.conformance.device_checks.worker`."""

from __future__ import annotations

import faulthandler
import importlib

from dicp.conformance.device_checks.checks import CHECKS, Device
from dicp.conformance.isolation import task
from dicp.conformance.names import EAGER_DEVICE


def main() -> None:
    """Run the checks that stdin does not list as done."""
    faulthandler.enable()
    job, tell, end = task()
    if job["device"] == EAGER_DEVICE:
        importlib.import_module("dicp.device.active")  # registers it
    device = Device(job["device"])
    for name, check in CHECKS.items():
        if name in job["done"]:
            continue
        tell({"began": name})
        try:
            found = check(device)
        except AssertionError as problem:
            tell({"name": name, "ok": False, "detail": str(problem)})
        except Exception as error:  # of any library; the other checks go on
            tell({"name": name, "ok": False, "detail": f"{type(error).__name__}: {error}"})
        else:
            tell({"name": name, "ok": True, "detail": found})
    end(True)


if __name__ == "__main__":
    main()
