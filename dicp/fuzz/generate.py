"""Random programs. Each statement is run in eager as it is drawn, so that every program is valid;
what eager refuses is drawn anew."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType

import torch

from dicp.fuzz.program import CALLS, Program, Statement, names
from dicp.fuzz.row import Row
from dicp.fuzz.slots import Choices, Draw, Scope, Undrawable
from dicp.fuzz.table import ROWS
from dicp.torch_private import HOST

MAX_ELEMENTS = 20_000
MAX_VALUE = 1e4
ATTEMPTS = 40
CONTEXTS = ("torch.no_grad()", f"torch.autocast({HOST!r}, dtype=torch.bfloat16)")


def generate(rng: random.Random, choices: Choices, rows: Sequence[Row] = ROWS) -> Program:
    """A program of a few statements."""
    scope = Scope(rng, choices)
    statements: list[Statement] = []
    wanted = rng.choices((1, 2, 3, 4, 6, 9), (15, 35, 25, 15, 7, 3))[0]
    context = rng.choice(CONTEXTS) if rng.random() < 0.06 else ""
    if choices.shared:
        scope.new_pair()
    for _ in range(ATTEMPTS):
        if len(statements) == wanted:
            break
        inside = context if rng.random() < 0.5 else ""
        statement = _drawn(scope, rng.choice(rows), inside, len(scope.values))
        if statement is not None:
            statements.append(statement)
    return Program(tuple(scope.inputs), tuple(statements), _outputs(scope, statements)).pruned()


def _outputs(scope: Scope, statements: Sequence[Statement]) -> tuple[str, ...]:
    """What no statement uses, sometimes more: inputs, values in between, one value twice."""
    used = set().union(*(statement.uses() for statement in statements))
    made = [name for statement in statements for name in statement.targets]
    outputs = [name for name in made if name not in used]
    if scope.rng.random() < 0.3 or not outputs:
        outputs += scope.rng.sample(list(scope.values), min(2, len(scope.values)))
    return tuple(outputs)


def _drawn(scope: Scope, row: Row, context: str, number: int) -> Statement | None:
    """A statement of `row` that is valid for the values of `scope`, to which its result is added"""
    inputs = len(scope.inputs)
    draw = Draw(scope, row.exact)
    targets = tuple(f"v{number + k}" for k in range(row.outs))
    try:
        for slot in row.slots:
            draw.fill(slot)
        statement = Statement(row.template, draw.args, targets, context, _wide(row))
        if _continues(scope, statement) and _executed(scope, statement):
            return statement
    except Undrawable:
        pass
    for each in scope.inputs[inputs:]:
        scope.values.pop(each.name, None)
        scope.wide.pop(each.name, None)
        scope.numbers.pop(each.name, None)
    del scope.inputs[inputs:]
    return None


def _continues(scope: Scope, statement: Statement) -> bool:
    """Whether it works on what was computed last, as most statements shall."""
    computed = [name for name in scope.values if name.startswith("v")]
    return not computed or computed[-1] in statement.uses() or scope.rng.random() < 0.15


def _wide(row: Row) -> str:
    """The template in float64: a cast keeps its rounding, a sum is accumulated in float64.

    What is computed from a cast, its gradient too, is not rounded: fused operators keep it in
    float32.
    """
    accumulated = row.template.replace("{a}", "torch.float64")
    if any(slot.split("_")[0] == "t" for slot in row.slots):
        inner, casts = re.subn(r"({\w+})((?:\.to\({t\w*}\))+)", _as_rounded, accumulated)
        return inner if casts else f"widened({accumulated})"
    return accumulated if "a" in row.slots else ""


def _as_rounded(casts: re.Match[str]) -> str:
    """`rounded({x}, {t})` for `{x}.to({t})`."""
    value, dtypes = casts[1], re.findall(r"{t\w*}", casts[2])
    return f"rounded({', '.join([value, *dtypes])})"


def _executed(scope: Scope, statement: Statement) -> bool:
    """Run the statement in every call; whether it is valid, and its results worth going on with."""
    used = list(scope.values)
    if statement.targets:
        used = sorted(statement.uses() & set(scope.values))
    held = [scope.wide[name] for name in used if name in scope.exact]
    before = [[each[call].detach().clone() for each in held] for call in range(CALLS)]
    try:
        eager = [_run(scope, scope.values, statement, call) for call in range(CALLS)]
        with double_precision():
            wide = [_run(scope, scope.wide, statement, call, True) for call in range(CALLS)]
    except Exception:
        return False
    results = list(zip(*eager, strict=True))
    if not statement.targets:
        for name in used:
            _note_exactness(scope, name, before)
        return True
    if len(results) != len(statement.targets) or not all(_worth(scope, r) for r in results):
        return False
    for k, target in enumerate(statement.targets):
        scope.values[target] = [call[k] for call in eager]
        scope.wide[target] = [call[k] for call in wide]
        _note_exactness(scope, target, before)
    for name in used:  # a buffer may be updated
        _note_exactness(scope, name, before)
    return True


def _run(
    scope: Scope,
    values: dict[str, list[torch.Tensor]],
    statement: Statement,
    call: int,
    wide: bool = False,
) -> tuple[torch.Tensor, ...]:
    local = {name: values[name][call] for name in statement.uses() if name in values}
    numbers = {name: each.numbers[call] for name, each in scope.numbers.items()}
    namespace = {**names(), **numbers, **local}
    source = statement.expression(wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with eval(statement.context or "nullcontext()", namespace):
            if not statement.targets:
                exec(_code(source, "exec"), namespace)
                return ()
            result = eval(_code(source, "eval"), namespace)
    return tuple(result) if len(statement.targets) > 1 else (result,)


@cache
def _code(source: str, mode: str) -> CodeType:
    return compile(source, "<statement>", mode)


def _worth(scope: Scope, results: Sequence[torch.Tensor]) -> bool:
    keeps = 0.9 if scope.choices.special < 0.1 else 0.3
    for value in results:
        if not isinstance(value, torch.Tensor) or value.numel() > MAX_ELEMENTS or value.ndim > 6:
            return False
        if value.is_complex() or value.layout is not torch.strided:
            return False
        odd = value.dtype.is_floating_point and value.numel() and scope.rng.random() < keeps
        if odd and not bool((value.detach().abs() < MAX_VALUE).float().mean() > 0.5):
            return False
    return len({(value.dtype, value.ndim) for value in results}) == 1


def _note_exactness(scope: Scope, name: str, operands: Sequence[Sequence[torch.Tensor]]) -> None:
    """A value is exact where eager has no rounding errors. `operands`: exact ones of each call."""
    triples = zip(scope.values[name], scope.wide[name], operands, strict=True)
    same = all(is_exact(*each) for each in triples)
    (scope.exact.add if same else scope.exact.discard)(name)


def is_exact(narrow: torch.Tensor, wide: torch.Tensor, operands: Sequence[torch.Tensor]) -> bool:
    """Whether a value has no rounding errors: it is that of the float64 run.

    One in float64 has none where it takes few digits, or is one of the operands' values.
    """
    if narrow.shape != wide.shape:
        return False
    narrow, wide = narrow.detach(), wide.detach()
    if not bool(((narrow == wide) | ((narrow != narrow) & (wide != wide))).all()):
        return False
    if narrow.dtype is not torch.float64:
        return True
    long = wide[wide.isfinite() & (wide.float().double() != wide)]
    held = [each.detach().double().reshape(-1) for each in operands]
    return not long.numel() or bool(held and torch.isin(long, torch.cat(held)).all())


@contextmanager
def double_precision() -> Iterator[None]:
    """Numbers become float64 tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
