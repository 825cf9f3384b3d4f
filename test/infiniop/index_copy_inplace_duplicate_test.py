"""Writes through repeating indices on the targets that platform flags name.

    python test/infiniop/index_copy_inplace_duplicate_test.py --cpu --metax --repeat 10

Every position that index_copy_, index_copy, scatter or index_put writes has to hold one of the
values written to it; gradients follow that value. The exit status is 1 if one does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pytest
import torch

from dicp.conformance.per_operator.duplicates import (
    CASES,
    DuplicateWrites,
    gradient_trouble,
    one_of_trouble,
)
from dicp.conformance.per_operator.platforms import device_of, listed, platforms

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all cases on the platforms; the exit status."""
    there = platforms()
    parser = argparse.ArgumentParser()
    for platform, backend in there.items():
        parser.add_argument(f"--{platform}", dest="backends", action="append_const", const=backend)
    parser.add_argument("--backend", dest="backends", action="append", metavar="B")
    parser.add_argument("--repeat", type=int, default=1, help="times each case is drawn anew")
    options = parser.parse_args(arguments)
    if not options.backends:
        parser.error(f"name a platform: {listed(there)}, or --backend B")
    failed = 0
    for backend in options.backends:
        device, note = device_of(backend)
        print(note or f"{backend} on {device}")
        for case in CASES:
            for dtype in DTYPES:
                found = (case.trouble(backend, dtype, device) for _ in range(options.repeat))
                trouble = next(filter(None, found), "")
                print(f"{backend} {str(dtype)[6:]} {case}: {trouble or 'one of the values stays'}")
                failed += bool(trouble)
    print(f"{failed} failed" if failed else "all passed")
    return 1 if failed else 0


@pytest.mark.sweep
@pytest.mark.parametrize("writes", CASES, ids=str)
def test_one_of_the_values_stays(writes: DuplicateWrites, backend_name: str) -> None:
    assert not writes.trouble(backend_name, torch.float32)


def test_the_script_says_what_each_case_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend", "eager", "--repeat", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("one of the values stays") == len(CASES) * len(DTYPES)
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_what_is_no_value_written_is_found() -> None:
    before, written = torch.zeros(4), torch.tensor([1.0, 2.0, 3.0])
    positions = torch.tensor([1, 1, 3])

    def trouble(*out: float) -> str:
        return one_of_trouble(torch.tensor(out), before, positions, written)

    assert not trouble(0, 1, 0, 3) and not trouble(0, 2, 0, 3)
    assert trouble(0, 3, 0, 3) == "1 positions, first (1,): 3 is none of 1, 2"
    assert trouble(0, 1, 5, 3) == "1 positions, first (2,): 5 is none of 0"
    assert trouble(0, 0, 0, 3), "nothing was written"


def test_gradients_follow_the_value_that_stayed() -> None:
    grad, out = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 0.0, 3.0])
    positions, written = torch.tensor([1, 1, 3]), torch.tensor([1.0, 2.0, 3.0])

    def trouble(of_x: list[float], of_source: list[float]) -> str:
        grads = (torch.tensor(of_x), torch.tensor(of_source))
        return gradient_trouble(grad, grads, out, positions, written)

    kept = [1.0, 0, 3, 0]
    assert not trouble(kept, [0, 2, 4]) and not trouble(kept, [2, 2, 4])
    assert "gradient of x" in trouble([1, 2, 3, 0], [0, 2, 4])
    assert "that stayed" in trouble(kept, [2, 0, 4])
    assert "overwritten" in trouble(kept, [4, 2, 4])


if __name__ == "__main__":
    sys.exit(main())
