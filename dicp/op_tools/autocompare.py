"""OpAutoCompare: every operator again on the CPU in float64, its values and gradients compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dicp.compare import Positions
from dicp.errors import CaptureFormatError, ToolVariableError
from dicp.op_tools import storage, trees
from dicp.op_tools.capture import CAPTURES, gradient_rows
from dicp.op_tools.draws import Draws
from dicp.op_tools.frame import Call, Proceed
from dicp.op_tools.gradients import Gradients, InputEdges, watch
from dicp.op_tools.held import HeldInputs, versions_of
from dicp.op_tools.names import is_constructor, overwrites
from dicp.op_tools.overwriting import written
from dicp.op_tools.records import CallId, CallSite, heading, logger
from dicp.op_tools.reference import (
    CPU,
    Reference,
    autocast_name,
    autocast_of,
    autocast_on,
    expected,
    reference_rules,
)
from dicp.op_tools.results import FeatureWithRecords, Rows
from dicp.op_tools.tables import (
    argument_table,
    labelled,
    labelled_arguments,
    labelled_result,
    table,
)
from dicp.op_tools.verdict import COLUMNS, Comparison, as_promised, compare

RESULTS = "op_autocompare_result"
_UNCOMPARED = frozenset(
    f"torch.Tensor.{name}" for name in "tolist numpy __array__ resize_ resize_as_ set_".split()
)
"""What gives no tensor, or memory without values of its own."""


@dataclass
class Record:
    """The comparisons of one call, or of its gradients."""

    operator: str
    id: CallId
    call_site: CallSite
    kind: str
    comparisons: list[Comparison] = field(default_factory=list)
    note: str = ""
    judged_by: str = "tolerance"
    nodes: str = ""
    """Of a kernel: its operators and their names in the graph."""

    @property
    def ok(self) -> bool:
        return all(self.passes(c) for c in self.comparisons)

    def passes(self, comparison: Comparison) -> bool:
        return comparison.fp64 if self.judged_by == "fp64" else comparison.allclose

    @property
    def ratio(self) -> float:
        """The worst error as a multiple of the tolerance."""
        return max((c.ratio for c in self.comparisons), default=0.0)

    @property
    def cosine(self) -> float:
        """The lowest cosine similarity of all values."""
        return min((c.cosine for c in self.comparisons), default=1.0)

    def verdicts(self) -> str:
        tolerance = all(c.allclose for c in self.comparisons)
        return f"verdicts: tolerance {tolerance}, fp64 {all(c.fp64 for c in self.comparisons)}"


Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """A call's arguments after it, and its result.

    move: what brings the first input's gradient from the positions of equal elements that the
    operator returned to those that `result` has; None: these are the same.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    move: Move | None = None

    @classmethod
    def of(cls, reference: Reference) -> Outcome:
        """That of a run of `reference`."""
        return cls(reference.args, reference.kwargs, reference.run())

    def at_positions_of(self, got: Outcome, positions: Positions | None) -> Outcome:
        """With the positions of equal elements that the device returned."""
        if positions is None:
            return self
        mine, theirs = ([*trees.tensors(each.result)] for each in (got, self))
        if not positions.result < len(mine) == len(theirs):
            return self
        old = theirs[positions.result]
        x = next(trees.tensors((self.args, self.kwargs)))
        new = positions.agreed(x, mine[positions.result].cpu(), old)
        if torch.equal(old, new):
            return self
        args, kwargs, result = trees.map_tensors(
            (self.args, self.kwargs, self.result), lambda tensor: new if tensor is old else tensor
        )
        return Outcome(args, kwargs, result, partial(positions.moved, old=old, new=new))


class OpAutoCompare(FeatureWithRecords[Record]):
    """Compares inputs after the call, outputs and gradients with a float64 run on the CPU.

    rule: "tolerance" or "fp64", the verdict that counts; both are printed. ignore_index: the place
    of an output that has no verdict. verbose: print arguments of calls that agree too.
    held_bytes: of inputs that wait in memory for their backward; more of them wait on disk.
    """

    feature = "autocompare"
    hook = "OpAutoCompareHook"
    variable = "AUTOCOMPARE"
    result_folder = RESULTS
    file_name = "op_autocompare_info"
    described = "op autocompare result"
    columns = printed_columns = ("forward_id", *COLUMNS)
    most_waiting = 100

    def __init__(
        self,
        ops: Sequence[str] | None = None,
        *,
        rule: str = "tolerance",
        ignore_index: int | None = None,
        verbose: bool = False,
        held_bytes: int = 1 << 28,
        **options: Any,
    ) -> None:
        super().__init__(ops, **options)
        if rule not in ("tolerance", "fp64"):
            raise ToolVariableError("rule", rule, "'tolerance' or 'fp64'")
        self.rule = rule
        self.ignore_index = ignore_index
        self.verbose = verbose
        self._held = HeldInputs(held_bytes)

    def skips(self, name: str) -> bool:
        return is_constructor(name) or name in _UNCOMPARED or "torch.distributed." in name

    # ---- forward --------------------------------------------------------------------------------

    def around(self, call: Call, proceed: Proceed) -> Any:
        args, kwargs = call.args, call.kwargs
        edges = InputEdges.of(args, kwargs, call.name)
        on_device = any(t.device.type != "cpu" for t in trees.tensors((args, kwargs)))
        compiled = call.operator is not call.func
        rules = reference_rules(call.name)
        try:
            reference = Reference.of(call.name, call.operator, args, kwargs, rules)
            # Eager in the same dtype: on the CPU, that is the call itself, unless it is compiled.
            same = reference.unwidened(args, kwargs) if on_device or compiled else None
            before = reference.unwidened(args, kwargs) if overwrites(call.name, kwargs) else None
            record = self._record(call, "forward")
            if before is not None:
                record.comparisons += _overwritten(call, before, reference)
        except ToolVariableError:
            raise
        except Exception as error:  # a tensor that the CPU has no form of
            self._no_reference(call, error)
            return proceed(call)
        promised = expected(call.operator, args, kwargs)
        versions = versions_of((args, kwargs))
        autocast = autocast_of(args, kwargs)
        draws = Draws.of(call.operator, args, kwargs)
        positions = Positions.of(call.name, args, kwargs)
        result = proceed(call)
        if draws.has_drawn(call.name):
            self._random(call, result)
            return result
        try:
            wanted = Outcome.of(reference)
            with autocast_on(CPU, autocast):
                eager = None if same is None else Outcome.of(same)
            got = Outcome(call.args, call.kwargs, result)
            wanted = wanted.at_positions_of(got, positions)
            eager = eager and eager.at_positions_of(got, positions)
            record.comparisons += self._compared(call.name, got, wanted, eager or got)
        except ToolVariableError:
            raise
        except Exception as error:  # operators raise whatever they like; results without values
            self._no_reference(call, error)
            return result
        self._check_promises(record, result, promised)
        if not record.ok:
            self._save(call, before, reference, result, wanted.result)
        self._report(record, call, result, reference, wanted.result)
        moves = wanted.move, eager.move if eager else None
        del reference, wanted, same, eager
        self._watch(call, edges, result, versions, before, moves)
        return result

    def _compared(
        self, name: str, got: Outcome, wanted: Outcome, eager: Outcome
    ) -> list[Comparison]:
        """Inputs after the call, then outputs."""
        sides = got, wanted, eager
        inputs = self._pairs(
            name, *(labelled_arguments(s.args, s.kwargs, f"{name} input") for s in sides)
        )
        outputs = self._pairs(name, *(labelled(s.result, f"{name} output") for s in sides))
        if self.ignore_index is not None and self.ignore_index < len(outputs):
            outputs[self.ignore_index] = _ignored(outputs[self.ignore_index])
        return [*inputs, *outputs]

    def _check_promises(
        self, record: Record, result: Any, promised: Any, shapes: bool = False
    ) -> None:
        """Results whose dtype is not what PyTorch's own inference says fail; `shapes`: whose shape,
        too, where no reference tells it."""
        if promised is None:
            return
        got, promises = list(labelled(result, "")), list(labelled(promised, ""))
        if len(got) != len(promises):
            info = f"Inconsistent output length: {len(got)} {len(promises)}"
            wrong = Comparison(f"{record.operator} output", False, error_info=info, fp64=False)
            record.comparisons.append(wrong)
            return
        outputs = {c.name: k for k, c in enumerate(record.comparisons)}
        names = [name for name, _ in labelled(result, f"{record.operator} output")]
        for place, (name, (_, value), (_, promise)) in enumerate(
            zip(names, got, promises, strict=True)
        ):
            if name in outputs and place != self.ignore_index:
                k = outputs[name]
                record.comparisons[k] = as_promised(record.comparisons[k], value, promise, shapes)

    def _pairs(self, operator: str, got: Any, reference: Any, eager: Any) -> list[Comparison]:
        left, right, third = list(got), list(reference), list(eager)
        if len(left) != len(right):
            info = f"Inconsistent output length: {len(left)} {len(right)}"
            return [Comparison(f"{operator} output", False, 0.0, error_info=info, fp64=False)]
        third = third if len(third) == len(left) else [("", None)] * len(left)
        triples = zip(left, right, third, strict=True)
        return [
            compare(operator, name, a, b, e)
            for (name, a), (_, b), (_, e) in triples
            if isinstance(a, (torch.Tensor, bool, int, float, complex))
        ]

    def _random(self, call: Call, result: Any) -> None:
        record = self._record(call, "forward")
        record.note = "random operator: shape and dtype only"
        promised = expected(call.operator, call.args, call.kwargs)
        leaves = labelled(result, f"{call.name} output")
        record.comparisons = [Comparison(name, True) for name, _ in leaves]
        self._check_promises(record, result, promised, shapes=True)
        self._report(record, call, result, None, None)

    def _no_reference(self, call: Call, error: Exception) -> None:
        record = self._record(call, "forward")
        record.note = f"no CPU form: {_first_line(error)}"
        self.keep(record)
        self.say(call.heading())
        self.say(record.note)

    # ---- backward -------------------------------------------------------------------------------

    def _watch(
        self, call: Call, edges: InputEdges, result: Any, versions: Any, before: Reference | None,
        moves: tuple[Move | None, Move | None],
    ) -> None:  # fmt: skip
        """Compare the gradients once they are there, from the inputs as they were."""
        if not edges.needed:
            return
        args, kwargs = (call.args, call.kwargs) if before is None else (before.args, before.kwargs)
        given = versions if before is None else versions_of((args, kwargs))
        try:
            held = self._held.hold(args, kwargs, given)
        except OSError as error:
            logger().warning(f"gradients of {call.name} are not compared: {error}")
            return
        autocast = autocast_of(args, kwargs)
        shown = copy(call)  # without the arguments, which it would keep in memory
        shown.args, shown.kwargs = (), {}

        def arrived(found: Gradients) -> None:
            record = self._record(shown, "backward")
            try:
                arguments = held.arguments()
            except CaptureFormatError as error:  # what waited on disk is lost
                record.note = f"not compared: {_first_line(error)}"
                self.keep(record)
                return
            if arguments is None:
                record.note = "an input was changed in place before backward: not compared"
                self.keep(record)
            else:
                with autocast_on(CPU, autocast):
                    self._backward(record, shown, *arguments, found, moves)

        watch(edges, result, arrived)

    def _backward(
        self, record: Record, call: Call, args: Any, kwargs: Any, found: Gradients,
        moves: tuple[Move | None, Move | None],
    ) -> None:  # fmt: skip
        on_device = any(g is not None and g.device.type != "cpu" for g in found.inputs)
        needed = [gradient is not None for gradient in found.inputs]
        try:
            reference = Reference.of(call.name, call.operator, args, kwargs)
            wanted = _moved(reference.gradients(found.outputs, needed), moves[0])
            eager: list[Any] = list(found.inputs)
            if on_device or call.operator is not call.func:
                same = reference.unwidened(args, kwargs)
                eager = _moved(same.gradients(found.outputs, needed), moves[1])
        except Exception as error:  # operators raise whatever they like
            record.note = f"no CPU form: {_first_line(error)}"
            self.keep(record)
            return
        # Autocast computes gradients of float32 weights in the dtype of the results.
        given = {g.dtype for g in found.outputs if g is not None and g.is_floating_point()}
        for place, (got, real) in enumerate(zip(found.inputs, wanted, strict=True)):
            if got is None:
                continue
            real = torch.zeros_like(got, device="cpu") if real is None else real
            name = f"{call.name} grad[{place}]"
            record.comparisons.append(
                compare(call.name, name, got, real, eager[place], computed=given)
            )
        self.keep(record)
        if self.style == "line":
            self._print_line(record)
            return
        self._print(record, call, reference)
        if not record.ok or self.verbose:
            rows = gradient_rows(call.name, found)
            outputs = [g if g is None else g.cpu() for g in found.outputs]
            cpu = Gradients(outputs, list(wanted), found.recorded)
            self.say(argument_table([*rows, *gradient_rows(call.name, cpu, "(cpu)")]))

    # ---- records --------------------------------------------------------------------------------

    def rows(self, record: Record) -> Rows:
        return [(str(record.id), *c.row()) for c in record.comparisons]

    def _record(self, call: Call, kind: str) -> Record:
        return Record(call.name, call.id, call.call_site, kind, judged_by=self.rule)

    def _report(
        self, record: Record, call: Call, result: Any, reference: Reference | None, wanted: Any
    ) -> None:
        self.keep(record)
        if self.style == "line":
            self._print_line(record)
            return
        self._print(record, call, reference)
        if not record.ok or self.verbose:
            rows = [
                *labelled_arguments(call.args, call.kwargs, f"{call.name} inputs"),
                *labelled_result(result, f"{call.name} outputs"),
            ]
            if reference is not None:
                name = call.name
                rows += labelled_arguments(reference.args, reference.kwargs, f"{name} inputs(cpu)")
                rows += labelled_result(wanted, f"{name} outputs(cpu)")
            self.say(argument_table(rows))

    def _print(self, record: Record, call: Call, reference: Reference | None) -> None:
        if self.quiet:
            return
        used = dict(reference.used) if reference is not None else {}
        info = f"cpu_dtype_cast_info(from:to): {used}"
        kind = ("backward",) if record.kind == "backward" else ()
        self.say(call.heading(*kind, info))
        if record.note:
            self.say(record.note)
        if record.comparisons:
            self.say(table(COLUMNS, [c.row() for c in record.comparisons]))
            self.say(record.verdicts())

    def _print_line(self, record: Record) -> None:
        worst = max((c.max_abs for c in record.comparisons), default=0.0)
        name = record.operator if record.kind == "forward" else f"{record.operator} grad"
        self.say(f"{self.hook}: {name} allclose: {record.ok} max_diff: {worst:.9f}")

    def _save(
        self, call: Call, before: Reference | None, reference: Reference, result: Any, wanted: Any
    ) -> None:
        """Inputs and outputs of both sides; what the call overwrites is saved as it was given."""
        given: tuple[Any, Any] = call.args, call.kwargs
        if before is not None:
            given = before.args, before.kwargs
            reference = Reference.of(call.name, call.operator, *given)
        base = self.folder / CAPTURES / call.name / str(os.getpid()) / "autocompare"
        folder = base / str(call.id.number) / call.id.time
        facts = {"operator": call.name, "forward_id": str(call.id), "source": str(call.call_site),
                 "autocast": autocast_name(*given)}  # fmt: skip
        try:
            for side, args, kwargs, out in (
                ("device", *given, result),
                ("cpu", reference.args, reference.kwargs, wanted),
            ):
                storage.save(folder / side / "input", {"args": args, "kwargs": kwargs}, facts)
                storage.save(folder / side / "output", out, facts)
        except (OSError, RuntimeError) as error:
            logger().warning(f"{folder} is not saved: {error}")
            return
        self.say(f"{folder} saved")

    def finish(self) -> None:
        operators = {r.operator for r in self.results}
        failed = [r for r in self.results if not r.ok]
        worst = max((r.ratio for r in self.results), default=0.0)
        cosine = min((r.cosine for r in self.results), default=1.0)
        lines = [
            f"autocompare: {len(operators)} operators, {len(self.results)} records, "
            f"{len(failed)} failures, worst error/tolerance {worst:.3g}, lowest cosine {cosine:.6f}"
        ]
        if failed:
            first = min(failed, key=lambda r: (r.id.number, r.kind == "backward"))
            where = heading(first.operator, first.id, first.call_site)
            lines.append(f"first failure: {where}")
        logger().info("\n".join(lines))

    @property
    def failures(self) -> list[Record]:
        return [record for record in self.results if not record.ok]


def _overwritten(call: Call, before: Reference, reference: Reference) -> list[Comparison]:
    """What the call is about to overwrite, beside the reference's: both begin alike."""
    chosen = {id(t) for t in written(call.name, call.args, call.kwargs)}
    label = f"{call.name} input(before)"
    sides = (
        labelled_arguments(side.args, side.kwargs, label) for side in (call, before, reference)
    )
    return [
        compare(call.name, name, own, wanted, own)
        for (name, given), (_, own), (_, wanted) in zip(*sides, strict=True)
        if id(given) in chosen
    ]


def _moved(gradients: list[Any], move: Move | None) -> list[Any]:
    """The gradients of the inputs, the first one moved."""
    first, *others = gradients
    return gradients if move is None or first is None else [move(first), *others]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _ignored(comparison: Comparison) -> Comparison:
    return Comparison(
        comparison.name, True, comparison.cosine, comparison.max_abs, comparison.max_relative,
        comparison.tolerance, "ignored (ignore_index)",
    )  # fmt: skip
