"""Cases from PyTorch's operator database, OpInfo: made when they are asked for, kept in no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from dicp.conformance.names import DTYPES
from dicp.conformance.suite.case import DATABASE_CALL, Case, function, given_operand
from dicp.conformance.suite.database import INPLACE, database
from dicp.conformance.torch_tests.op_tests import UNDEFINED_VALUES, spread
from dicp.errors import CaseError
from dicp.torch_private import pytree


def database_cases(
    name: str, samples: int, dtypes: Sequence[str] = DTYPES
) -> Iterator[Case]:  # fmt: skip
    """`samples` cases of each dtype that an operator takes on the CPU, 0: all; one in place."""
    op = database()[name]
    for dtype in (getattr(torch, dtype) for dtype in dtypes):
        if dtype in op.supported_dtypes("cpu"):
            yield from _cases(op, name, dtype, samples)


def _cases(op: Any, name: str, dtype: torch.dtype, samples: int) -> Iterator[Case]:
    short = str(dtype).removeprefix("torch.")
    grads = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    call = _call(op, name)
    for number, sample in enumerate(_samples(op, dtype, samples, grads)):
        if number == 0 and grads:
            grads = _gradients_are_unique(op, sample)
        case = Case(
            name, f"{short}-{number}", call, short, reference=op.name not in UNDEFINED_VALUES
        )
        yield _with_arguments(case, sample, grads)
    inplace = op.get_inplace()
    if inplace is not None:
        fitting = (s for s in _samples(op, dtype, 0, False) if not s.broadcasts_input)
        for sample in fitting:
            method = getattr(inplace, "__name__", "")  # some are partial objects
            call = _dotted(inplace, f"torch.Tensor.{method}", f"{INPLACE}{name}")
            case = Case(name, f"{short}-inplace", call, short, inplace=True)
            yield _with_arguments(case, sample, False)
            break


def _samples(op: Any, dtype: torch.dtype, count: int, grads: bool) -> list[Any]:
    torch.manual_seed(0)
    try:
        found = op.sample_inputs("cpu", dtype, requires_grad=grads)
        return spread(found, count)
    except Exception:  # the database has no samples of some dtypes that operators take
        return []


def _with_arguments(case: Case, sample: Any, grads: bool) -> Case:
    args, kwargs = pytree.tree_map(
        lambda leaf: (
            given_operand(leaf.detach(), grads and leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        ((sample.input, *sample.args), dict(sample.kwargs)),
    )
    return replace(case, args=args, kwargs=kwargs)


def _gradients_are_unique(op: Any, sample: Any) -> bool:
    """Whether the database takes gradients of the results as they are: of signs that a
    decomposition may choose, say, it does not."""
    try:
        out = op(sample.input, *sample.args, **sample.kwargs)
        return sample.output_process_fn_grad(out) is out
    except Exception:  # of results that have another form than the database expects
        return False


def _call(op: Any, name: str) -> str:
    return _dotted(op.op, f"torch.{op.name}", name)


def _dotted(fn: Any, dotted: str, name: str) -> str:
    """The dotted name, where it is the same function; else that of the database."""
    try:
        same = function(dotted) == fn
    except CaseError:
        same = False
    return dotted if same else f"{DATABASE_CALL}{name}"
