"""Runs one operator's cases on the targets that the platform flags name.

    python test/infiniop/softmax.py --cpu --metax              verify, a line per case
    python test/infiniop/softmax.py --nvidia --profile         times of torch and of dicp

The flags are those of public InfiniCore's per-operator scripts. A platform whose chip is absent
runs its simulator. The exit status is 1 if a case fails, 2 for flags that are not known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dicp.conformance.per_operator.platforms import OTHERS, device_of, listed, platforms
from dicp.conformance.per_operator.runs import DTYPES, Run
from dicp.conformance.per_operator.table import BY_FORMULA, OPERATORS


def parser_of(name: str, there: dict[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(name)
    for platform, backend in there.items():
        parser.add_argument(f"--{platform}", dest="backends", action="append_const", const=backend)
    for platform in OTHERS:
        parser.add_argument(f"--{platform}", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backend", dest="backends", action="append", metavar="B")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--num_prerun", type=int, default=10)
    parser.add_argument("--num_iterations", type=int, default=1000)
    parser.add_argument("--debug", action="store_true", help="print the tensors of failing cases")
    parser.add_argument("--repeat", type=int, default=1, help="times each case is drawn anew")
    parser.add_argument("--dtypes", default="", help=",".join(DTYPES))
    return parser


def main(name: str, arguments: Sequence[str] | None = None) -> int:
    """Runs the operator that a script is named after; the exit status."""
    stem, there = Path(name).stem, platforms()
    operators = [table[stem] for table in (OPERATORS, BY_FORMULA) if stem in table]
    parser = parser_of(Path(name).name, there)
    options = parser.parse_args(arguments)
    for platform in OTHERS:
        if getattr(options, platform):
            parser.error(f"no target is for --{platform}; there are {listed(there)}")
    if not options.backends:
        parser.error(f"name a platform: {listed(there)}, or --backend B")
    wanted = options.dtypes.split(",") if options.dtypes else operators[0].dtypes
    if unknown := set(wanted) - DTYPES.keys():
        parser.error(f"unknown dtypes {', '.join(sorted(unknown))}; there are {', '.join(DTYPES)}")
    failed = 0
    for backend in options.backends:
        device, note = device_of(backend)
        if note:
            print(note)
        for operator in operators:
            for case in operator.cases:
                for dtype in wanted:
                    failed += _one(Run(operator, case, DTYPES[dtype], device), backend, options)
    print(f"{failed} failed" if failed else "all passed")
    return 1 if failed else 0


def _one(run: Run, backend: str, options: argparse.Namespace) -> bool:
    """Runs one case and prints its line; whether it fails."""
    formula = " by formula" if run.operator.prepare is not None else ""
    label = f"{backend} {str(run.dtype).removeprefix('torch.')}{formula} {run.case}"
    if options.profile:
        times = run.profile(backend, options.num_prerun, options.num_iterations)
        print(f"{label}: {times}")
        return False
    outcome, tight = run.verify(backend, options.repeat)
    state = outcome.trouble or f"passed, {outcome.error:.2f} of the tolerance{tight}"
    print(f"{label}: {state}")
    if outcome.trouble and options.debug:
        torch.manual_seed(0)
        for number, x in enumerate(run.inputs()):
            print(f"operand {number}: {x}")
    return bool(outcome.trouble)


def start(name: str) -> None:
    """What a script calls."""
    sys.exit(main(name))
