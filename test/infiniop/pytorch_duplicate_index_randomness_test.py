"""How often eager PyTorch keeps another one of several values written to the same position.

    python test/infiniop/pytorch_duplicate_index_randomness_test.py --repeat 100 --threads 4

A line for each operator: the share of positions whose value changed between runs, and of those that
kept the last value written. It is a study, not a check: PyTorch defines none of the values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pytest
import torch

from dicp.conformance.per_operator.duplicates import CASES, DuplicateWrites, cases_of, winners


def shares(case: DuplicateWrites, repeat: int) -> tuple[float, float]:
    """The shares of positions that changed between runs, and that kept the last value."""
    runs = []
    for _ in range(repeat):
        torch.manual_seed(0)
        runs.append(winners(case).flatten())
    torch.manual_seed(0)
    index = case.operands(torch.float32)[1]
    positions = case.positions(torch.arange(len(runs[0])).view(case.shape), index).flatten()
    last = torch.full_like(runs[0], -1)
    last.scatter_reduce_(0, positions, torch.arange(len(positions)).double(), "amax")
    kept = torch.stack([run[last >= 0] for run in runs])
    changed = (kept != kept[0]).any(0).double().mean()
    return float(changed), float((kept == last[last >= 0]).double().mean())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=100, help="runs of each operator")
    parser.add_argument("--values", type=int, default=20000, help="that are written in a row")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        print(f"torch {torch.__version__}, {options.threads} threads, {options.repeat} runs")
        for case in cases_of(options.values):
            changed, last = shares(case, options.repeat)
            print(f"{case.name} {case.shape}: {changed:.1%} of the positions changed between runs, "
                  f"{last:.1%} kept the last value")  # fmt: skip
    finally:
        torch.set_num_threads(before)
    return 0


def test_a_line_for_each_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repeat", "3", "--values", "500", "--threads", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "1 threads, 3 runs" in head and len(lines) == len(CASES)
    assert all("0.0% of the positions changed" in line for line in lines), "of one thread"


if __name__ == "__main__":
    sys.exit(main())
