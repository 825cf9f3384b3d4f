"""OpOverflowCheck: infinities, NaN and statistics of every tensor that an operator touches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.errors import OverflowFoundError
from dicp.op_tools.capture import argument_rows, gradient_rows, result_rows
from dicp.op_tools.frame import Call, Feature, Proceed
from dicp.op_tools.gradients import Gradients, InputEdges, watch
from dicp.op_tools.records import CallId, CallSite, heading, logger
from dicp.op_tools.tables import table
from dicp.op_tools.verdict import dense_chunks

COLUMNS = ("name", "inf_or_nan", "min", "max", "mean", "std", "norm1", "norm2", "norm_inf")


@dataclass(frozen=True)
class Statistics:
    """One tensor's values, computed in float64 over the finite ones."""

    name: str
    counts: tuple[int, ...]
    """How many values are inf, -inf and nan, and how many there are."""
    numbers: tuple[float, ...]
    """min, max, mean, std, norm1, norm2, norm_inf."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Statistics:
        value = tensor.detach()
        if value.layout != torch.strided:
            value = value.to_dense()
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        if not value.numel():
            return cls(name, (0,) * 4, (0.0,) * 7)
        sums = _Sums()
        for part in dense_chunks(value):
            sums.add(part)
        return cls(name, (*sums.bad, value.numel()), sums.numbers())

    @property
    def bad(self) -> bool:
        return any(self.counts[:3])

    @property
    def counted(self) -> str:
        """How many values are bad, such as `3 inf, 1 nan of 16 values`."""
        kinds = zip(self.counts, ("inf", "-inf", "nan"), strict=False)
        parts = ", ".join(f"{count} {kind}" for count, kind in kinds if count)
        return f"{parts} of {self.counts[3]} values"

    def row(self) -> tuple[object, ...]:
        return (self.name, self.bad, *(f"{number:.9g}" for number in self.numbers))


@dataclass
class _Sums:
    """What the statistics of a tensor are made of, collected piece by piece in float64."""

    bad: list[int] = field(default_factory=lambda: [0, 0, 0])
    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    spread: float = 0.0
    """The sum of squared distances from the mean."""
    norm1: float = 0.0
    squares: float = 0.0

    def add(self, part: torch.Tensor) -> None:
        finite = part.isfinite()
        if not finite.all():
            for k, kind in enumerate((part == math.inf, part == -math.inf, part.isnan())):
                self.bad[k] += int(kind.sum())
            part = part[finite]
        count = part.numel()
        if not count:
            return
        mean, total = float(part.mean()), self.count + count
        away = mean - self.mean
        self.spread += float((part - mean).square().sum())
        self.spread += away * away * self.count * count / total
        self.mean += away * count / total
        self.count = total
        self.low, self.high = min(self.low, float(part.min())), max(self.high, float(part.max()))
        self.norm1 += float(part.abs().sum())
        self.squares += float(part.square().sum())

    def numbers(self) -> tuple[float, ...]:
        if not self.count:
            return (math.nan,) * 7
        largest = max(abs(self.low), abs(self.high))
        std = math.sqrt(self.spread / self.count)
        return (self.low, self.high, self.mean, std, self.norm1, math.sqrt(self.squares), largest)


@dataclass(frozen=True)
class Finding:
    """A call that gave or took a value that is infinite or not a number."""

    operator: str
    tensor: str
    counted: str
    id: CallId
    call_site: CallSite
    in_inputs: bool


class OpOverflowCheck(Feature):
    """Looks for inf and nan in inputs, outputs and gradients.

    only_bad: print offenders alone. raise_on_bad: raise OverflowFoundError at the first operator
    that makes one. `findings` holds the offenders; the first one is named at the end.
    """

    feature = "overflow_check"
    hook = "OpOverflowCheckHook"
    variable = "OVERFLOW_CHECK"

    def __init__(
        self,
        ops: Sequence[str] | None = None,
        *,
        only_bad: bool = False,
        raise_on_bad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(ops, **options)
        self.only_bad = only_bad
        self.raise_on_bad = raise_on_bad
        self.findings: list[Finding] = []

    def around(self, call: Call, proceed: Proceed) -> Any:
        edges = InputEdges.of(call.args, call.kwargs, call.name)
        inputs = statistics(argument_rows(call))
        result = proceed(call)
        outputs = statistics(result_rows(call.name, result))
        self.check(call, inputs, outputs)

        def backward(found: Gradients) -> None:
            rows = statistics(gradient_rows(call.name, found))
            count = len([g for g in found.outputs if g is not None])
            self.check(call, rows[:count], rows[count:], "backward")

        watch(edges, result, backward)
        return result

    def check(
        self, call: Call, inputs: list[Statistics], outputs: list[Statistics], *more: str
    ) -> None:
        """Print the statistics of one call and keep what is bad."""
        rows = [*inputs, *outputs]
        bad = next((r for r in (*outputs, *inputs) if r.bad), None)
        if self.style == "line" and (bad is not None or not self.only_bad):
            self.say(f"{self.hook}: {' '.join((call.name, *more))} inf_or_nan: {bad is not None}")
        elif rows and (bad is not None or not self.only_bad):
            self.say(call.heading(*more))
            shown = [r for r in rows if r.bad] if self.only_bad else rows
            self.say(table(COLUMNS, [r.row() for r in shown]))
            for r in shown:
                if r.bad:
                    self.say(f"{r.name}: {r.counted}")
        if bad is None:
            return
        carried = any(r.bad for r in inputs)
        with self._lock:
            found = Finding(call.name, bad.name, bad.counted, call.id, call.call_site, carried)
            self.findings.append(found)
        if self.raise_on_bad:
            raise OverflowFoundError(call.name, bad.name, bad.counted, call.call_site.short)

    @property
    def first(self) -> Finding | None:
        """The first operator that made a bad value from good ones, else the first that met one."""
        made = (f for f in self.findings if not f.in_inputs)
        return next(made, self.findings[0] if self.findings else None)

    def finish(self) -> None:
        first = self.first
        if first is None:
            logger().info("overflow_check: no inf or nan")
            return
        where = heading(first.operator, first.id, first.call_site, first.counted)
        logger().info(f"overflow_check: first inf or nan in {first.tensor}: {where}")


def statistics(rows: Sequence[tuple[str, Any]]) -> list[Statistics]:
    return [
        Statistics.of(name, value)
        for name, value in rows
        if isinstance(value, torch.Tensor) and value.device.type != "meta"
    ]
