"""Tests of the operators of PyTorch's database: each against eager on the CPU and in float64.

The plugin of `dicp.conformance.torch_tests.worker` gives each test its cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from dicp.compare import Positions, Rule
from dicp.conformance.names import DTYPES
from dicp.testing.backends import BackendUnderTest
from dicp.testing.cases import created_on
from dicp.testing.evaluation import Results, compare, copied, evaluate, in_float64
from dicp.torch_private import pytree

UNDEFINED_VALUES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Operators whose results have no values to compare."""
SAMPLES_LOOKED_AT = 40
SHOWN_PROBLEMS = 6
Variant = Callable[..., Any]
"""A function of a sample: its input, then its arguments."""


@dataclass
class OperatorCase:
    """An operator in a dtype; None: in all of them."""

    op: Any
    dtype: torch.dtype | None
    device: str
    backend: BackendUnderTest | None
    most: int
    rule: Rule = field(default_factory=Rule)

    def __str__(self) -> str:
        name = full_name(self.op)
        dtype = str(self.dtype).removeprefix("torch.")
        return name if self.dtype is None else f"{name}-{dtype}"

    def samples(self, gradients: bool = False) -> list[Any]:
        """Samples on the device, with what PyTorch leaves on the host."""
        torch.manual_seed(0)
        found = self.op.sample_inputs(self.device, self.dtype, requires_grad=gradients)
        return spread(found, self.most)

    def check(
        self,
        samples: Iterable[Any],
        variant: Callable[[Any], Variant],
        gradients: bool = False,
    ) -> None:
        """Fail if a sample differs from eager; skip if eager takes none of them."""
        graphs = self.backend.graphs if self.backend else 0
        _judge(
            (f"sample {number}", self.problems(variant(sample), sample, gradients))
            for number, sample in enumerate(samples)
        )
        if self.backend is not None and self.backend.graphs == graphs:
            pytest.skip("no graph reaches the backend: Dynamo leaves the operator to eager")

    def problems(
        self,
        function: Variant,
        sample: Any,
        gradients: bool = False,
        refusals: bool = False,
        reference: Variant | None = None,
    ) -> list[str] | None:
        """What differs from eager on the CPU; None if eager refuses the sample.

        `refusals`: that eager refuses it is the sample's purpose. `reference`: what is right,
        where `function` itself in eager is not.
        """
        group = [sample.input, tuple(sample.args), dict(sample.kwargs)]
        leaves = pytree.tree_leaves(group)
        flags = [leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)]
        flags = [gradients and flag for flag in flags]

        call = _grouped(function)
        exact = _grouped(reference or function)
        on_host = self._on_host(group)
        try:
            eager, random = _seeded(exact, on_host, flags)
        except NotImplementedError:  # it has no kernel for a dtype, which the device may have
            return None
        except Exception as error:
            if not refusals:
                return None
            return self._missing_error(call, group, flags, error)
        truth = None if random else in_float64(exact, [on_host], flags)
        try:
            got = self._run(call, group, flags)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:600]}"
            return [f"eager has a result, and here is an error: {text}"]
        asked = [str(leaf) for leaf in leaves if isinstance(leaf, str | torch.device)]
        devices = {v.device for v in got.outputs if isinstance(v, torch.Tensor)}
        misplaced = [f"a result lies on {d}" for d in devices
                     if d.type != self.device and d.type not in asked]  # fmt: skip
        got = got.on_host()
        if self.op.name in UNDEFINED_VALUES:
            got, truth = _without_values(got, eager), None
        positions = Positions.of(self.op.name, (sample.input, *sample.args), sample.kwargs)
        return misplaced + compare(got, eager, truth[0] if truth else None, self.rule, positions)

    def outs(self, sample: Any) -> list[tuple[str, Any]]:
        """The sample with each kind of `out`; none where there is no result."""
        try:
            with created_on(self.device):
                expected = self.op(sample.input, *sample.args, **sample.kwargs)
        except Exception:
            return []
        found = []
        for kind, make in OUTS.items():
            out = pytree.tree_map(_for_tensors(make), expected)
            if isinstance(out, tuple):
                out = tuple(out)  # a named tuple is no `out`
            keywords = {**sample.kwargs, "out": out}
            found.append((kind, type(sample)(sample.input, args=sample.args, kwargs=keywords)))
        return found

    def _missing_error(
        self, call: Any, group: Any, flags: Sequence[bool], error: Exception
    ) -> list[str]:
        try:
            self._run(call, group, flags)
        except Exception:
            return []
        text = str(error).splitlines()[0] if str(error) else ""
        return [f"eager refuses it, and here is a result: {type(error).__name__}: {text}"]

    def _run(self, call: Any, group: Any, flags: Sequence[bool]) -> Results:
        """The results on the device, compiled if there is a backend."""
        if self.backend is not None:
            torch.compiler.reset()
            options = {"fallback_random": True} if self.backend.is_dicp else None
            call = torch.compile(call, backend=self.backend, dynamic=False, options=options)
        with created_on(self.device):
            results, _ = _seeded(call, group, flags)
        return results

    def _on_host(self, group: Any) -> Any:
        """The arguments with all tensors, and the devices that they name, on the host."""

        def one(value: Any) -> Any:
            if isinstance(value, torch.device) or (isinstance(value, str) and value == self.device):
                return torch.device("cpu")
            return copied(value, "cpu")

        return group if self.device == "cpu" else pytree.tree_map(one, group)


class TestOperators:
    """What each test compares: see its name."""

    def test_forward(self, case: OperatorCase) -> None:
        case.check(case.samples(), lambda sample: case.op)

    def test_gradients(self, case: OperatorCase) -> None:
        def variant(sample: Any) -> Variant:
            return lambda *args, **kwargs: sample.output_process_fn_grad(case.op(*args, **kwargs))

        case.check(case.samples(gradients=True), variant, gradients=True)

    def test_noncontiguous(self, case: OperatorCase) -> None:
        try:
            samples = [sample.noncontiguous() for sample in case.samples()]
        except RuntimeError as error:  # of sparse tensors
            pytest.skip(f"no other layout: {error}")
        case.check(samples, lambda sample: case.op)

    def test_inplace(self, case: OperatorCase) -> None:
        samples = (sample for sample in case.samples() if not sample.broadcasts_input)
        case.check(samples, lambda sample: case.op.get_inplace())

    def test_out(self, case: OperatorCase) -> None:
        """Results into given tensors: as large, with gaps, without elements, of another dtype."""

        def problems(kind: str, given: Any) -> list[str] | None:
            found = case.problems(case.op, given, refusals=True)
            if found and kind == "with gaps":  # eager writes some as if there were none
                right = case.problems(case.op, given, reference=_with_copy_to_out(case.op))
                return found if right else right
            return found

        _judge(
            (f"sample {number}, out {kind}", problems(kind, given))
            for number, sample in enumerate(case.samples())
            for kind, given in case.outs(sample)
        )

    def test_errors(self, case: OperatorCase) -> None:
        """What eager refuses is refused."""
        errors = case.op.error_inputs(case.device)
        found = (case.problems(case.op, e.sample_input, refusals=True) for e in errors)
        _fail_with([text for texts in found for text in texts or ()])

    def test_dtypes(self, case: OperatorCase) -> None:
        """Every dtype gives a result where it does in eager on the CPU, and else an error."""
        problems: list[str] = []
        for name in DTYPES:
            case.dtype = getattr(torch, name)
            try:
                sample = next(iter(case.op.sample_inputs(case.device, case.dtype)))
            except Exception:  # the database has no samples of a dtype that is not supported
                continue
            found = case.problems(case.op, sample, refusals=True)
            problems += [f"{name}: {text}" for text in found or ()]
        _fail_with(problems)


def _judge(found: Iterable[tuple[str, list[str] | None]]) -> None:
    """Fail with the problems of samples, by their names; skip if eager takes none of them."""
    taken = [(name, texts) for name, texts in found if texts is not None]
    _fail_with([f"{name}: {text}" for name, texts in taken for text in texts])
    if not taken:
        pytest.skip("eager takes none of the samples")


def _fail_with(problems: Sequence[str]) -> None:
    assert not problems, "\n".join(problems[:SHOWN_PROBLEMS])


def full_name(op: Any) -> str:
    """The name of an operator of the database: name, or name.variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def dtypes_of(kind: str, op: Any, dtypes: Sequence[torch.dtype]) -> list[torch.dtype | None]:
    """The dtypes of an operator's cases in a test: None for one case of all dtypes."""
    if kind in ("errors", "dtypes"):
        return [None] if kind == "dtypes" or op.error_inputs_func is not None else []
    missing = {"inplace": op.get_inplace() is None, "out": not op.supports_out}
    if missing.get(kind, False):
        return []
    if kind == "gradients":
        supported = op.supported_backward_dtypes("cpu")
    else:
        supported = op.supported_dtypes("cpu")
    return [dtype for dtype in dtypes if dtype in supported]


def spread(items: Iterable[Any], count: int) -> list[Any]:
    """`count` items, evenly spread over the first SAMPLES_LOOKED_AT; all for 0."""
    if count == 0:
        return list(items)
    found = list(itertools.islice(items, SAMPLES_LOOKED_AT))
    if len(found) <= count:
        return found
    return [found[round(k * (len(found) - 1) / max(count - 1, 1))] for k in range(count)]


def _seeded(call: Any, group: Any, flags: Sequence[bool]) -> tuple[Results, bool]:
    """The results, and whether random numbers of the host were drawn."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    (results,) = evaluate(call, [group], flags)
    return results, not torch.equal(before, torch.get_rng_state())


def _without_values(got: Results, eager: Results) -> Results:
    """`got` with the values of eager where dtype, shape and strides agree."""

    def forms(values: list[Any], theirs: list[Any]) -> list[Any]:
        return [
            b if (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) else a
            for a, b in zip(values, theirs, strict=True)
        ]

    return replace(
        got, outputs=forms(got.outputs, eager.outputs), inputs=forms(got.inputs, eager.inputs)
    )


def _grouped(function: Variant) -> Callable[[list[Any]], list[Any]]:
    def call(groups: list[Any]) -> list[Any]:
        return [function(given, *args, **kwargs) for given, args, kwargs in groups]

    return call


def _with_copy_to_out(op: Any) -> Variant:
    """The operator, whose results are then copied to `out`."""

    def run(given: Any, *args: Any, out: Any, **kwargs: Any) -> Any:
        results = pytree.tree_leaves(op(given, *args, **kwargs))
        for one, result in zip(pytree.tree_leaves(out), results, strict=True):
            one.copy_(result)
        return out

    return run


def _for_tensors(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda value: make(value) if isinstance(value, torch.Tensor) else value


def _filled(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value.detach()).fill_(1)


def _gapped(value: torch.Tensor) -> torch.Tensor:
    wide = torch.ones((*value.shape, 2), dtype=value.dtype, device=value.device)
    return wide[..., 0]


def _empty(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=value.dtype, device=value.device)


def _other(value: torch.Tensor) -> torch.Tensor:
    real = value.is_floating_point() or value.is_complex()
    dtype = torch.int64 if real else torch.float64
    return torch.ones(value.shape, dtype=dtype, device=value.device)


OUTS = {"as large": _filled, "with gaps": _gapped, "empty": _empty, "of another dtype": _other}
"""Kinds of given results."""
