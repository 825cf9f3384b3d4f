"""Running recorded modules again, compiled or on a device, beside eager and beside float64.

Each module is given the inputs and gradients that were recorded, so that errors do not add up;
`chained` gives only the model what was recorded, and each module what the one before it made.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dicp.dynamo_bridge.timed import copied_as_laid_out
from dicp.errors import CaptureFormatError, RecordingMismatchError
from dicp.op_tools import trees
from dicp.op_tools.autocompare import OpAutoCompare, Record
from dicp.op_tools.draws import GeneratorStates
from dicp.op_tools.frame import FRAME
from dicp.op_tools.recording import ModuleCall, Recorder, Recording
from dicp.op_tools.reference import CPU, autocast_named, widened, widened_dtypes, writable
from dicp.op_tools.tables import table
from dicp.op_tools.verdict import Comparison, as_promised, compare, dense_chunks
from dicp.torch_private import original_module, set_compiled_call

COLUMNS = ("module", "call", "tensor", "error", "max_relative_diff", "verdict", "error_info")
Values = dict[str, torch.Tensor]
"""What one run of a module gave, by the names that are printed."""


@dataclass
class ModuleRecord:
    """The comparisons of one call of a module, or of the optimizer's step."""

    call: ModuleCall
    comparisons: list[Comparison] = field(default_factory=list)
    note: str = ""
    is_step: bool = False

    @property
    def path(self) -> str:
        return self.call.path

    @property
    def ok(self) -> bool:
        return all(c.fp64 for c in self.comparisons)

    def rows(self) -> Iterator[tuple[object, ...]]:
        place = f"{self.call.iteration}/{self.call.number}"
        for c in self.comparisons:
            verdict = "ok" if c.fp64 else "wrong"
            yield (self.call.name, place, c.name, f"{c.max_abs:.9f}", f"{c.max_relative:.9f}",
                   verdict, c.error_info)  # fmt: skip
        if self.note:
            yield (self.call.name, place, "", "", "", "", self.note)


@dataclass
class ModuleReport:
    """The records of all calls, in their order; `inside` names what diverges in compiled ones."""

    records: list[ModuleRecord] = field(default_factory=list)
    inside: dict[str, list[Record]] = field(default_factory=dict)

    @property
    def failures(self) -> list[ModuleRecord]:
        return [record for record in self.records if not record.ok]

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def innermost(self) -> list[ModuleRecord]:
        """The failures without a failure in a module below."""
        return innermost(self.failures)

    @property
    def first(self) -> ModuleRecord | None:
        """The innermost module with the first wrong value: forward, then backward from the end."""

        def wrong(record: ModuleRecord, gradient: bool) -> bool:
            failed = (c for c in record.comparisons if not c.fp64)
            return any(c.name.startswith("grad") == gradient for c in failed)

        forward = [r for r in self.records if wrong(r, gradient=False)]
        backward = [r for r in reversed(self.records) if wrong(r, gradient=True)]
        return next(iter((*innermost(forward), *innermost(backward))), None)

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Rows of COLUMNS: every tensor in order, then the operators that diverge in modules."""
        for record in self.records:
            yield from record.rows()
        for path, records in self.inside.items():
            for r in records:
                worst = max((c.max_abs for c in r.comparisons), default=0.0)
                relative = max((c.max_relative for c in r.comparisons), default=0.0)
                yield (path or "(model)", "", f"{r.kind} {r.operator}", f"{worst:.9f}",
                       f"{relative:.9f}", "wrong", r.call_site.short)  # fmt: skip

    def __str__(self) -> str:
        rows = [row for record in self.records for row in record.rows()]
        lines = [table(COLUMNS, rows)] if rows else []
        for path, records in self.inside.items():
            for r in records:
                where = f" at {r.call_site.short}" if r.call_site.short else ""
                lines.append(f"in {path or '(model)'}: {r.kind} {r.operator}{where}")
        tensors = sum(len(r.comparisons) for r in self.records)
        head = f"one_iter: {len(self.records)} calls of modules, {tensors} tensors, "
        text = f"{len(self.failures)} calls wrong"
        first = self.first
        if first is not None:
            wrong = next(c for c in first.comparisons if not c.fp64)
            text += f"; first: {first.call.name} ({first.call.kind}): {wrong.name}"
        return "\n".join([*lines, head + text])


def innermost(records: Sequence[ModuleRecord]) -> list[ModuleRecord]:
    """The records without one of a module below."""
    paths = {r.path for r in records}
    return [r for r in records if not any(is_below(p, r.path) for p in paths)]


def is_below(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}."))


@dataclass(frozen=True)
class Tested:
    """How the tested side runs: a backend of torch.compile, a device, or both."""

    backend: str | None
    device: torch.device

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.backend is None:
            return function
        options = _same_draws(self.backend)
        return torch.compile(function, backend=self.backend, dynamic=False, options=options)


def _same_draws(backend: str) -> dict[str, Any] | None:
    """The option by which a backend draws what eager draws."""
    known = backend.endswith("graph") or backend in ("dicp", "inductor")
    return {"fallback_random": True} if known else None


class Comparing:
    """One recording beside one model."""

    def __init__(
        self, recording: Recording, model: nn.Module, optimizer: torch.optim.Optimizer | None,
        tested: Tested,
    ) -> None:  # fmt: skip
        self.recording = recording
        self.given = model
        self.tested = tested
        self.whole = original_module(model) is not model and tested.backend is None
        self.optimizer = optimizer
        pair = copy.deepcopy((original_module(model), optimizer))
        self.eager: nn.Module = pair[0].to(CPU)
        self.eager_optimizer: torch.optim.Optimizer | None = pair[1]
        self._compiled: dict[str, tuple[nn.Module, Callable[..., Any]]] = {}

    # ---- each module on what was recorded -------------------------------------------------------

    def calls(self) -> Iterator[ModuleCall]:
        return (c for c in self.recording.calls if not (self.whole and c.path))

    def report(self) -> ModuleReport:
        report = ModuleReport()
        iteration = -1
        for call in self.calls():
            if call.iteration != iteration:
                if iteration >= 0:
                    self._add_step(report, iteration)
                iteration = call.iteration
                self._load(iteration)
            report.records.append(self._judged(call))
        if iteration >= 0:
            self._add_step(report, iteration)
        for record in report.innermost:
            if self._is_compiled() and not record.is_step:
                self._load(record.call.iteration)
                report.inside.setdefault(record.path, self._diverging_operators(record.call))
        return report

    def _is_compiled(self) -> bool:
        return self.whole or self.tested.backend is not None

    def _load(self, iteration: int) -> None:
        weights = self.recording.load(f"iteration{iteration}", "weights_before").value
        try:
            self.eager.load_state_dict(weights)
        except RuntimeError as error:
            found = _differences(weights, self.eager.state_dict())
            raise self._other(*(found or [_reason(error)])) from error
        for call in self.recording.calls:
            if call.iteration == iteration:
                with contextlib.suppress(AttributeError):  # a module that the model lacks
                    self.eager.get_submodule(call.path).training = call.training

    def _other(self, *differences: str) -> RecordingMismatchError:
        """The error that says how the model differs from the recorded one."""
        return RecordingMismatchError(self.recording.folder, differences)

    def _eager(self, recorded_call: RecordedCall, module: nn.Module) -> Values:
        """The values of a module in eager. Raises RecordingMismatchError."""
        name = f"{recorded_call.call.name} ({type(module).__name__})"
        same = copy.deepcopy(module)
        try:
            values = recorded_call.run(same, same)
        except Exception as error:  # modules raise whatever they like
            text = f"{name} cannot be run on its recorded inputs and gradients: {_reason(error)}"
            weights = self.recording.load(
                f"iteration{recorded_call.call.iteration}", "weights_before"
            ).value
            raise self._other(text, *_differences(weights, self.eager.state_dict())) from error
        if self.recording.has(recorded_call.call.folder, "output"):
            saved = self.recording.load(recorded_call.call.folder, "output").value
            recorded = {f"output[{k}]": t for k, t in enumerate(trees.tensors(saved))}
            given = {n: v for n, v in values.items() if n.startswith("output")}
            # The dtypes that autocast gives differ between devices.
            found = _differences(recorded, given, lambda t: str(tuple(t.shape)))
            if found:
                raise self._other(*(f"{name}: {line}" for line in found))
        return values

    def _judged(self, call: ModuleCall) -> ModuleRecord:
        record = ModuleRecord(call)
        try:
            recorded_call = RecordedCall.read(self.recording, call)
            module = self.eager.get_submodule(call.path)
        except (CaptureFormatError, AttributeError) as error:
            record.note = f"not run: {str(error).splitlines()[0]}"
            return record
        eager = self._eager(recorded_call, module)
        wanted = recorded_call.run(*widened_module(module), wide=True)
        got = recorded_call.run(*self._tested_module(call.path, module), device=self.tested.device)
        if call.random and self.tested.device != CPU:
            record.note = "random: shape and dtype only"
            wanted = eager = got
        record.comparisons = compared(got, wanted, eager)
        return record

    def _tested_module(self, path: str, module: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
        """A module with the recorded weights and how to call it; each is compiled once."""
        if self.whole:
            inner = original_module(self.given)
            inner.load_state_dict(self.eager.state_dict())
            return inner, self.given
        if path not in self._compiled:
            own = copy.deepcopy(module).to(self.tested.device)
            self._compiled[path] = own, self.tested.compiled(own)
        own, call = self._compiled[path]
        own.load_state_dict(module.state_dict())
        for one, other in zip(own.modules(), module.modules(), strict=True):
            one.training = other.training
        return own, call

    def _diverging_operators(self, call: ModuleCall) -> list[Record]:
        """What diverges in a compiled module's graphs: operators, else kernels."""
        recorded_call = RecordedCall.read(self.recording, call)
        module = self.eager.get_submodule(call.path)
        with OpAutoCompare().silently() as tool:
            recorded_call.run(*self._tested_module(call.path, module), device=self.tested.device)
        failed = [r for r in tool.failures if r.kind in ("operator", "kernel")]
        return [r for r in failed if r.kind == "operator"] or failed

    # ---- the optimizer's step -------------------------------------------------------------------

    def _add_step(self, report: ModuleReport, iteration: int) -> None:
        place = f"iteration{iteration}"
        if self.eager_optimizer is None or not self.recording.has(place, "parameter_grads"):
            return
        call = ModuleCall(iteration, 1 + max(c.number for c in self.recording.calls), "optimizer",
                          type(self.eager_optimizer).__name__, True)  # fmt: skip
        record = ModuleRecord(call, is_step=True)
        try:
            state = self.recording.load(place, "optimizer_before").value
            grads = self.recording.load(place, "parameter_grads").value
            # Dynamo traces other formulas than the optimizer runs: eager is what was traced.
            traced = None if self.tested.backend is None else Tested("eager", CPU)
            try:
                wanted = self._stepped(state, grads, None, wide=True)
            except (KeyError, RuntimeError, ValueError) as error:
                text = f"a step of {call.kind} from the recorded state raises {_reason(error)}"
                raise self._other(text) from error
            got = self._stepped(state, grads, self.tested)
            eager = self._stepped(state, grads, traced)
            record.comparisons = compared(got, wanted, eager)
        except CaptureFormatError as error:
            record.note = f"not run: {error}"
        report.records.append(record)

    def _stepped(
        self, state: Any, grads: Mapping[str, Any], run: Tested | None, *, wide: bool = False
    ) -> Values:
        """The weights after a step of a copy of the optimizer, from the recorded gradients."""
        model, optimizer = copy.deepcopy((self.eager, self.eager_optimizer))
        assert optimizer is not None
        device = CPU if run is None else run.device
        model = widened_weights(model) if wide else model.to(device)
        for name, parameter in model.named_parameters():
            gradient = grads.get(name)
            parameter.grad = None if gradient is None else gradient.to(device, parameter.dtype)
        optimizer.load_state_dict(copy.deepcopy(state))
        step = optimizer.step if run is None else run.compiled(optimizer.step)
        with FRAME.unhooked():
            step()
        return {f"weight {n}": p.detach() for n, p in model.named_parameters() if n in grads}

    # ---- chained --------------------------------------------------------------------------------

    def chained(self) -> ModuleReport:
        """The whole model on the recorded inputs, three times; its modules' results in order."""
        report = ModuleReport()
        for call in self.calls():
            if call.path:
                continue
            self._load(call.iteration)
            recorded_call = RecordedCall.read(self.recording, call)
            self._eager(recorded_call, self.eager)
            wanted = _run_recorded(recorded_call, *widened_module(self.eager), wide=True)
            same = copy.deepcopy(self.eager)
            eager = _run_recorded(recorded_call, same, same)
            got = _run_recorded(recorded_call, *self._chained_model(), device=self.tested.device)
            report.records += _paired(call, got, wanted, eager)
        return report

    def _chained_model(self) -> tuple[nn.Module, nn.Module]:
        if self.whole:
            return self._tested_module("", self.eager)[0], self.given
        own = copy.deepcopy(self.eager).to(self.tested.device)
        if self.tested.backend is not None:
            for module in own.modules():
                if not any(True for _ in module.children()):
                    alike = copy.copy(module)  # the same parameters and buffers, not compiled
                    set_compiled_call(module, self.tested.compiled(alike))
        return own, own


@dataclass(frozen=True)
class RecordedCall:
    """What a module was given: inputs, gradients of its outputs, the state of random numbers."""

    call: ModuleCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_outputs: list[torch.Tensor | None]
    random_states: GeneratorStates

    @classmethod
    def read(cls, recording: Recording, call: ModuleCall) -> RecordedCall:
        """Raises CaptureFormatError."""
        saved = recording.load(call.folder, "input")
        gradients: list[Any] = []
        if recording.has(call.folder, "grad_outputs"):
            gradients = recording.load(call.folder, "grad_outputs").value
        try:
            states = GeneratorStates.of_facts(saved.facts)
            if states is None:
                raise KeyError("random_state")
            return cls(call, saved.value["args"], saved.value["kwargs"], gradients, states)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it holds no call of a module ({type(error).__name__}: {error})"
            path = recording.folder / call.folder
            raise CaptureFormatError(path, reason, by="one_iter.record") from error

    def run(
        self, module: nn.Module, function: Callable[..., Any], *, wide: bool = False,
        device: torch.device = CPU,
    ) -> Values:  # fmt: skip
        """Forward and backward once: inputs after the call, results, gradients, buffers."""
        args, kwargs, leaves = self._inputs(wide, device)
        if module.training != self.call.training:
            module.train(self.call.training)
        module.zero_grad(set_to_none=True)
        before = GeneratorStates.on({*self.random_states.devices, device})
        self.random_states.restore()
        try:
            with FRAME.unhooked(), widened_dtypes(wide):
                with autocast_named(self.call.autocast, device):
                    result = function(*args, **kwargs)
                return self._values(module, (args, kwargs), leaves, result)
        finally:
            before.restore()

    def _inputs(self, wide: bool, device: torch.device) -> tuple[Any, Any, list[torch.Tensor]]:
        """Copies of the recorded inputs, and the leaves whose gradients are wanted."""
        leaves: list[torch.Tensor] = []

        def leaf(value: torch.Tensor) -> torch.Tensor:
            new = widened(value.detach()) if wide else value.detach()
            new = copied_as_laid_out(new, device)
            if not value.requires_grad:
                return new
            leaves.append(new.requires_grad_())
            return writable(new)

        args, kwargs = trees.map_tensors((tuple(self.args), dict(self.kwargs)), leaf)
        return args, kwargs, leaves

    def _values(
        self, module: nn.Module, given: Any, leaves: list[torch.Tensor], result: Any
    ) -> Values:
        results = list(trees.tensors(result))
        pairs = [
            (r, g.to(r.device, r.dtype))
            for r, g in zip(results, self.grad_outputs, strict=False)
            if g is not None and r.requires_grad
        ]
        values = {f"input[{k}]": t.detach() for k, t in enumerate(trees.tensors(given))}
        values |= {f"output[{k}]": t.detach().clone() for k, t in enumerate(results)}
        values |= {f"buffer {n}": b.clone() for n, b in module.named_buffers()}
        if pairs:
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        for k, leaf in enumerate(leaves):
            if leaf.grad is not None:
                values[f"grad_input[{k}]"] = leaf.grad
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                values[f"grad {name}"] = parameter.grad
        return values


def widened_weights(module: nn.Module) -> nn.Module:
    """The module itself, its floating parameters and buffers in float64."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = widened(tensor.data)
    return module


def widened_module(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    copied = widened_weights(copy.deepcopy(module))
    return copied, copied


def compared(got: Values, wanted: Values, eager: Values) -> list[Comparison]:
    """Each value by the fp64 rule; one that is missing on a side is wrong.

    A gradient whose terms cancel, such as that of a bias before a norm, has roundings of them. One
    that is missing is 0: compiled graphs give zeros where eager gives None.
    """
    wanted, eager, got = _with_zeros(wanted, eager, got)
    largest = max((_peak(v) for n, v in wanted.items() if n.startswith("grad")), default=0.0)
    found = []
    for name in dict.fromkeys((*eager, *got)):
        if name not in got or name not in eager or name not in wanted:
            sides = [s for s, v in (("tested", got), ("eager", eager)) if name in v]
            found.append(Comparison(name, False, error_info=f"only {sides[0]} has it", fp64=False))
            continue
        scale = largest if name.startswith("grad") else 0.0
        result = compare("module", name, got[name].cpu(), wanted[name], eager[name], scale)
        if got[name].shape == wanted[name].shape:
            result = replace(result, error_info="")  # float64 is no inconsistency here
        found.append(as_promised(result, got[name], eager[name]))
    return found


def _with_zeros(*sides: Values) -> Iterator[Values]:
    """The sides, with zeros for gradients that only others have."""
    gradients = {n: v for side in sides for n, v in side.items() if n.startswith("grad")}
    for side in sides:
        yield side | {n: torch.zeros_like(v) for n, v in gradients.items() if n not in side}


def _peak(value: torch.Tensor) -> float:
    parts = dense_chunks(value)
    return max((float(part.abs().nan_to_num(0, 0, 0).max()) for part in parts), default=0.0)


def _differences(
    recorded: Mapping[str, Any], given: Mapping[str, Any],
    described: Callable[[torch.Tensor], str] = lambda t: f"{t.dtype} {tuple(t.shape)}",
) -> list[str]:  # fmt: skip
    """How named tensors differ from those of the recording."""
    found = []
    for name in dict.fromkeys((*recorded, *given)):
        sides = [side.get(name) for side in (recorded, given)]
        if all(isinstance(side, torch.Tensor | None) for side in sides):
            was, now = ("missing" if t is None else described(t) for t in sides)
            if was != now:
                found.append(f"{name}: {was} in the recording, {now} in the model")
    return found


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".replace("\n", " ")


class _Memory:
    """A recorder's sink: the values of each call, by the names that are printed."""

    def __init__(self) -> None:
        self.values: defaultdict[str, Values] = defaultdict(dict)

    def save(self, place: str, file: str, value: Any, facts: Mapping[str, Any]) -> None:
        if file in ("output", "grad_outputs"):
            for k, t in enumerate(trees.tensors(value)):
                self.values[place][f"{file}[{k}]"] = t.detach().clone()

    def finish(self, calls: list[ModuleCall]) -> None:
        pass


def _run_recorded(
    recorded_call: RecordedCall, module: nn.Module, function: nn.Module, **options: Any
) -> tuple[list[ModuleCall], Mapping[str, Values]]:
    sink = _Memory()
    with Recorder(function, None, sink) as recorder:
        recorded_call.run(module, function, **options)
    return recorder.calls, sink.values


def _paired(whole: ModuleCall, got: Any, wanted: Any, eager: Any) -> list[ModuleRecord]:
    """A record per call of the tested run that the others have too."""
    found = []
    for call in got[0]:
        values = [side[1].get(call.folder) for side in (got, wanted, eager)]
        if all(v is not None for v in values):
            shown = copy.copy(call)
            shown.iteration = whole.iteration
            found.append(ModuleRecord(shown, compared(*values)))
    return found
