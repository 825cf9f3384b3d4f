"""A process of a campaign: `python -m dicp.fuzz.worker work|check|draw`, with JSON on stdin."""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
from typing import Any

import torch

from dicp.config import environment
from dicp.fuzz.campaign import check_once, draw_once, plan_from, work


def main() -> None:
    """Do what the first argument says."""
    faulthandler.enable()
    logging.disable(logging.CRITICAL)  # what PyTorch has to say about programs that it refuses
    torch.set_num_threads(1)
    given: dict[str, Any] = json.load(sys.stdin)
    folder = tempfile.mkdtemp(prefix="dicp-fuzz-")
    try:
        with environment(DICP_CACHE_DIR=folder):
            if sys.argv[1] == "check":
                check_once(given)
                return
            if sys.argv[1] == "draw":
                draw_once(given)
                return
            plan = plan_from(given["plan"])
            numbers = itertools.count(given["first"], given["step"])
            work(plan, numbers, _write, set(given["muted"]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # past what PyTorch does at exit, which costs a second
