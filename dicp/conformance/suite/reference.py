"""Reference data: a case with its values, eager's results in its dtype, and those in float64.

An operator has two files: NAME.safetensors, and NAME.json, which names the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load, save

from dicp.conformance.suite.case import Case, function
from dicp.conformance.suite.codec import Decoder, Encoder
from dicp.conformance.suite.sources import making_command
from dicp.errors import ReferenceDataError
from dicp.op_tools.cases import NotStorableError
from dicp.testing.evaluation import Call, Results, copied, evaluate, in_float64
from dicp.torch_private import pytree, schema_of
from dicp.version import VERSION

FORMAT: Final = 1
Json = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """A drawn case and its results. truth: None where there is no form in float64."""

    case: Case
    eager: Results
    truth: Results | None


def call_of(fn: Callable[..., Any]) -> Call:
    """The function of groups [arguments, keywords]."""
    schema = schema_of(fn)
    names = [each.name for each in schema.arguments if not each.kwarg_only] if schema else []
    # Of gradients of attention: Dynamo takes a keyword `out` for the tensor of the result.
    names = names[: names.index("out") + 1] if "out" in names else []

    def call(groups: list[Any]) -> list[Any]:
        return [
            fn(
                *args,
                *[kwargs[name] for name in names[len(args) :]],
                **{name: value for name, value in kwargs.items() if name not in names},
            )
            for args, kwargs in groups
        ]

    return call


def group_of(case: Case) -> list[Any]:
    return list(case.arguments())


def seeded(call: Call, group: list[Any], flags: list[bool]) -> tuple[Results, bool]:
    """The results, and whether random numbers of the host were drawn.

    Without gradients as in inference, where some operators save nothing for a gradient.
    """
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.set_grad_enabled(any(flags)):
        (results,) = evaluate(call, [group], flags)
    return results, not torch.equal(before, torch.get_rng_state())


def computed(case: Case, device: str = "cpu") -> Reference:
    """The results of eager on a device; raises what eager raises."""
    case = case.drawn()
    call, group = call_of(function(case.call)), group_of(case)
    if device != "cpu":
        group = pytree.tree_map(lambda value: copied(value, device), group)
    eager, random = seeded(call, group, case.flags)
    case = replace(case, random=case.random or random)
    exact = case.random or not case.reference
    truth = None if exact else in_float64(call, [group], case.flags)
    return Reference(case, eager.on_host(), truth[0].on_host() if truth else None)


@dataclass(frozen=True)
class Written:
    """What `write` stored: cases, bytes, and how many cases it left out for what reason."""

    cases: int
    bytes: int
    left_out: Mapping[str, int]


def stem(operator: str) -> str:
    return operator.replace("/", "_")


def write(folder: Path, operator: str, cases: Iterable[Case], device: str, made: Json) -> Written:
    """Compute and store an operator's reference data; `made`: how, for a later `is_current`."""
    tensors: dict[str, torch.Tensor] = {}
    forms: list[Json] = []
    left_out: Counter[str] = Counter()
    for number, case in enumerate(cases):
        encoder = Encoder(str(number))
        try:
            reference = computed(case, device)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            left_out[f"eager refuses it: {type(error).__name__}: {reason[:80]}"] += 1
            continue
        try:
            forms.append(_form(reference, encoder))
        except NotStorableError as error:
            left_out[f"no form for {error}"] += 1
            continue
        tensors |= encoder.tensors
    data = save(tensors)
    head = {
        "format": FORMAT, "operator": operator, "made": made, "device": device,
        "versions": {"torch": torch.__version__, "dicp": VERSION},
        "digest": _digest(data, forms), "left_out": dict(left_out), "cases": forms,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(head).encode()
    for suffix, content in ((".safetensors", data), (".json", text)):
        partial = folder / f"{stem(operator)}{suffix}.partial"
        partial.write_bytes(content)
        partial.replace(folder / f"{stem(operator)}{suffix}")
    return Written(len(forms), len(data) + len(text), dict(left_out))


def is_current(folder: Path, operator: str, made: Json) -> bool:
    """Whether the data are there, undamaged, made in the same way."""
    try:
        head = OperatorData.read(folder, operator).head
    except ReferenceDataError:
        return False
    return bool(head["made"] == made and head["versions"]["torch"] == torch.__version__)


def stored(folder: Path) -> list[str]:
    """The operators that a folder has data of."""
    return sorted(str(_head(path)["operator"]) for path in folder.glob("*.json"))


@dataclass(frozen=True)
class OperatorData:
    """The reference data of one operator."""

    operator: str
    head: Json
    data: bytes

    @classmethod
    def read(cls, folder: Path, operator: str) -> OperatorData:
        """Raises ReferenceDataError for data that are absent, damaged or of another version."""
        path = folder / f"{stem(operator)}.json"
        head = _head(path)
        tensors = path.with_suffix("").with_name(f"{stem(operator)}.safetensors")
        try:
            data = tensors.read_bytes()
        except OSError as error:
            raise _unusable(tensors, f"it cannot be read: {error}", operator, head) from None
        if _digest(data, head["cases"]) != head["digest"]:
            problem = f"it is damaged: its digest is another than {path.name} says"
            raise _unusable(tensors, problem, operator, head)
        return cls(operator, head, data)

    @property
    def forms(self) -> list[Json]:
        return self.head["cases"]  # type: ignore[no-any-return]

    @property
    def keys(self) -> list[str]:
        return [form["key"] for form in self.forms]

    def references(self) -> Iterator[Reference]:
        decoder = Decoder(load(self.data))
        return (_reference(self.operator, form, decoder) for form in self.forms)


def _head(path: Path) -> Json:
    try:
        head: Json = json.loads(path.read_text("utf-8"))
        version = head["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"it cannot be read: {type(error).__name__}: {error}"
        raise _unusable(path, problem, path.stem, {}) from None
    if version != FORMAT:
        problem = f"it has version {version}, this release reads version {FORMAT}"
        raise _unusable(path, problem, head.get("operator", path.stem), head)
    return head


def _unusable(path: Path, problem: str, operator: str, head: Json) -> ReferenceDataError:
    command = making_command(path.parent, [operator], head.get("made", {}))
    return ReferenceDataError(path, problem, command)


def _digest(data: bytes, forms: list[Json]) -> str:
    return hashlib.sha256(data + json.dumps(forms).encode()).hexdigest()


def _form(reference: Reference, encoder: Encoder) -> Json:
    case, truth = reference.case, reference.truth
    before = [operand.value for operand in case.operands]
    form = {
        "key": case.key, "call": case.call, "dtype": case.dtype, "seed": case.seed,
        "args": encoder.encode(list(case.args)), "kwargs": encoder.encode(dict(case.kwargs)),
        "inplace": case.inplace, "random": case.random, "reference": case.reference,
        "tolerance": case.tolerance, "tags": list(case.tags),
        "eager": _results_form(reference.eager, before, encoder),
    }  # fmt: skip
    if truth is not None and any(_has_truth(value) for value in _values(reference.eager)):
        exact = Results(
            _where_real(truth.outputs, reference.eager.outputs),
            truth.inputs, _where_real(truth.grads, reference.eager.grads), set(),
        )  # fmt: skip
        form["truth"] = _results_form(exact, before, encoder)
    return form


def _values(results: Results) -> list[Any]:
    return [*results.outputs, *results.inputs, *results.grads]


def _has_truth(value: Any) -> bool:
    real = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return real and value.dtype not in (torch.float64, torch.complex128)


def _where_real(exact: list[Any], eager: list[Any]) -> list[Any]:
    if len(exact) != len(eager):
        return []
    return [a if _has_truth(b) else None for a, b in zip(exact, eager, strict=True)]


def _results_form(results: Results, before: list[Any], encoder: Encoder) -> Json:
    """Inputs that the call did not change are None."""
    changed = [
        None if _same(now, then) else now for now, then in zip(results.inputs, before, strict=True)
    ]
    return {
        "outputs": encoder.encode(results.outputs), "inputs": encoder.encode(changed),
        "grads": encoder.encode(results.grads), "shared": sorted(map(list, results.shared)),
    }  # fmt: skip


def _same(now: torch.Tensor, then: torch.Tensor) -> bool:
    if now.shape != then.shape:
        return False
    wide = then.to(now.dtype)
    return bool(((now == wide) | (now.isnan() & wide.isnan())).all())


def _reference(operator: str, form: Json, decoder: Decoder) -> Reference:
    tolerance = form["tolerance"]
    case = Case(
        operator, form["key"], form["call"], form["dtype"],
        tuple(decoder.decode(form["args"], operands=True)),
        decoder.decode(form["kwargs"], operands=True), form["inplace"], form["random"],
        form["reference"], None, tuple(tolerance) if tolerance else None, tuple(form["tags"]),
    )  # fmt: skip
    eager = _results(form["eager"], case, decoder)
    truth = _results(form["truth"], case, decoder) if "truth" in form else None
    return Reference(case, eager, truth)


def _results(form: Json, case: Case, decoder: Decoder) -> Results:
    inputs = [
        operand.value if now is None else now
        for now, operand in zip(decoder.decode(form["inputs"]), case.operands, strict=True)
    ]
    shared = {tuple(relation) for relation in form["shared"]}
    return Results(decoder.decode(form["outputs"]), inputs, decoder.decode(form["grads"]), shared)
