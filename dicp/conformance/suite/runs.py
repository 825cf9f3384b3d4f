"""Runs stored cases on a device, compiled or in eager, and judges them against the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dicp.compare import Positions
from dicp.conformance.configuration import Configuration
from dicp.conformance.suite.case import Case, function
from dicp.conformance.suite.judge import Judge
from dicp.conformance.suite.reference import Reference, call_of, group_of, seeded
from dicp.conformance.timing import median_seconds
from dicp.report.rates import copy_seconds
from dicp.testing.backends import BackendUnderTest
from dicp.testing.cases import created_on
from dicp.testing.evaluation import Call, Results, copied
from dicp.torch_private import pytree

NO_GRAPH = "no graph reaches the backend: Dynamo leaves the operator to eager"
PRINTED_CHARACTERS = 4000
COPIED_BYTES = 1 << 26
"""How much is copied to measure the bandwidth: more than caches hold."""


@dataclass(frozen=True)
class CaseUnit:
    """What one process does: `gen_data` or `run_test` for some operators, `data` the folder.

    cases: a folder of case files besides dicp's own. model: the file of a recorded list, whose
    cases alone are meant. backend: empty for eager. nhwc_min_dim: inputs of as many dimensions are
    channels-last; 0: none. profile: how often each case that passes is timed; 0: never.
    """

    file: str
    task: str
    device: str
    data: str
    operators: tuple[str, ...]
    backend: str = ""
    samples: int = 0
    cases: str = ""
    model: str = ""
    config: str = ""
    filter_dtype: tuple[str, ...] = ()
    nhwc_min_dim: int = 0
    four_bytes: bool = False
    strict: bool = False
    debug_level: int = 0
    profile: int = 0
    worker: ClassVar[str] = "dicp.conformance.suite.worker"


@dataclass(frozen=True)
class Outcome:
    """The result of a test, as `Row` has it."""

    result: str
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Runner:
    """Runs the cases of a unit."""

    unit: CaseUnit

    @cached_property
    def backend(self) -> BackendUnderTest | None:
        unit = self.unit
        return BackendUnderTest(unit.backend, unit.device) if unit.backend else None

    @cached_property
    def settings(self) -> Configuration:
        return Configuration.read(Path(self.unit.config) if self.unit.config else None)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that a copy on the device reads and writes."""
        return 2 * COPIED_BYTES / copy_seconds(COPIED_BYTES, torch.device(self.unit.device))

    def start(self) -> None:
        """Load what the first case would load otherwise, within its time limit."""
        torch.ones(1).to(self.unit.device).cpu()
        if self.backend is not None:
            torch.compile(torch.neg, backend=self.backend)

    def skipped(self, case: Case) -> Outcome | None:
        """What a case comes to that the configuration skips; None for one that it lets run."""
        skip = self.settings.skip_of(case)
        if skip is None:
            return None
        return Outcome("skipped", skip.reason, {**_details(case), "skip_line": skip.line})

    def outcome(self, reference: Reference) -> Outcome:
        """Whether the case passes; a case that the configuration skips runs only under `strict`."""
        details = _details(reference.case)
        if reference.case.dtype in self.unit.filter_dtype:
            return Outcome("skipped", f"--filter_dtype {reference.case.dtype}", details)
        skipped = self.skipped(reference.case)
        if skipped is not None and not self.unit.strict:
            return skipped
        try:
            found = self._run(reference)
        except Exception as error:
            if skipped is not None:
                return skipped
            text = f"{type(error).__name__}: {str(error)[:1500]}"
            return Outcome("failed", f"eager has a result, and here is an error: {text}", details)
        if skipped is None:
            return replace(found, details={**details, **found.details})
        details = {**skipped.details, **found.details}
        if found.result != "passed":
            return replace(skipped, details=details)
        return Outcome("failed", f"it passes, and is skipped: {skipped.reason}", details)

    def _run(self, reference: Reference) -> Outcome:
        case = reference.case
        group = self._converted(group_of(case))
        if self.unit.four_bytes:
            reference, group = _in_four_bytes(reference, group)
        graphs = self.backend.graphs if self.backend else 0
        got, decisions, call = self._results(case, group)
        tolerance = self.settings.case_tolerance(case) or case.tolerance
        positions = Positions.of(case.call, case.args, case.kwargs)
        strides = not self.unit.nhwc_min_dim
        judge = Judge(tolerance, strides, case.random, case.reference, positions)
        verdict = judge.verdict(got.on_host(), reference.eager, reference.truth)
        details = {
            "max_error": verdict.max_error, "index": list(verdict.index), "atol": verdict.atol,
            "rtol": verdict.rtol, "needed_atol": verdict.needed_atol,
            "needed_rtol": verdict.needed_rtol, "decisions": decisions,
        }  # fmt: skip
        if verdict.problem:
            return Outcome(
                "failed", verdict.problem, details | self._printed(group, got, reference)
            )
        if self.backend is not None and self.backend.graphs == graphs:
            return Outcome("skipped", NO_GRAPH, details)
        if self.unit.profile:
            details |= self._times(case, group, call)
        return Outcome("passed", "", details)

    def _results(self, case: Case, group: list[Any]) -> tuple[Results, dict[str, str], Call]:
        """The results on the device, how the backend decided on each ATen operator, and what
        computed them."""
        call = call_of(function(case.call))
        unit = self.unit
        before = len(self.backend.reports()) if self.backend else 0
        if self.backend is not None:
            torch.compiler.reset()
            call = torch.compile(call, backend=self.backend, dynamic=False)
        with created_on(unit.device):
            results, _ = seeded(call, self._moved(group), case.flags)
        reports = self.backend.reports(before) if self.backend else []
        decisions = {node.op: node.decision for report in reports for node in report.nodes}
        return results, decisions, call

    def _moved(self, group: list[Any]) -> list[Any]:
        """The arguments on the device."""
        return group if self.unit.device == "cpu" else pytree.tree_map(self._on_device, group)

    def _times(self, case: Case, group: list[Any], call: Call) -> dict[str, float]:
        """Milliseconds of a call, of eager's on the device, and the share of the bandwidth of a
        copy that the tensors which go in and out take."""
        on_device = self._moved(pytree.tree_map_only(Tensor, torch.clone, group))
        with created_on(self.unit.device), torch.no_grad():
            mine, theirs = (
                median_seconds(partial(fn, [on_device]), self.unit.device, 2, self.unit.profile)
                for fn in (call, call_of(function(case.call)))
            )
            out = call([on_device])
        tensors = [v for v in pytree.tree_leaves((on_device, out)) if isinstance(v, Tensor)]
        moved = sum(tensor.nbytes for tensor in tensors)
        return {
            "ms": mine * 1e3, "eager_ms": theirs * 1e3, "copy_share": moved / mine / self.bandwidth,
        }  # fmt: skip

    def _on_device(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(self.unit.device)
        return copied(value, self.unit.device)

    def _converted(self, group: list[Any]) -> list[Any]:
        least = self.unit.nhwc_min_dim
        if not least:
            return group
        return pytree.tree_map(
            lambda v: channels_last(v) if isinstance(v, Tensor) and v.ndim >= least else v, group
        )

    def _printed(self, group: list[Any], got: Results, reference: Reference) -> dict[str, str]:
        """Inputs and outputs of a case that fails, where they are asked for."""
        if self.unit.debug_level < 2:
            return {}
        parts = {"inputs": group, "outputs": got.outputs, "reference": reference.eager.outputs}
        text = "\n".join(f"{name}: {value}" for name, value in parts.items())
        return {"values": text[:PRINTED_CHARACTERS]}


def _details(case: Case) -> dict[str, Any]:
    return {
        "case": str(case), "operator": case.name, "key": case.key, "dtype": case.dtype,
        "shapes": [list(operand.shape) for operand in case.operands],
    }  # fmt: skip


def channels_last(value: Tensor) -> Tensor:
    """The values with the channels, dimension 1, innermost in memory."""
    if value.ndim < 3 or 0 in value.stride():
        return value
    return value.movedim(1, -1).contiguous().movedim(-1, 1)


def _in_four_bytes(reference: Reference, group: list[Any]) -> tuple[Reference, list[Any]]:
    """The case with int32 for int64, and eager's results for it, where eager takes it so."""
    narrow = pytree.tree_map(
        lambda v: v.int() if isinstance(v, Tensor) and v.dtype == torch.int64 else v, group
    )
    call: Callable[..., Any] = call_of(function(reference.case.call))
    try:
        eager, _ = seeded(call, narrow, reference.case.flags)
    except Exception:
        return reference, group
    return replace(reference, eager=eager), narrow
