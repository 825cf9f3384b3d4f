"""An operator case: one function, all its dtypes and layouts in one graph, against eager in fp64.

`op(torch.relu, (6, 37))` is a whole test. Compiling a graph costs far more than running it, so a
case compiles one graph that applies the function to every variant of its inputs; only when that
graph fails to compile or to run is each variant tried alone, to name the culprit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.compare import Rule
from dicp.testing.backends import BackendUnderTest
from dicp.testing.evaluation import compare, copied, evaluate, in_float64
from dicp.testing.inputs import LAYOUT_OF, Sizes, T, draw, map_specs, special_columns
from dicp.torch_private import OpOverload, dynamo_config, pytree

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTS = (torch.int64, torch.int32, torch.uint8, torch.bool)
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")
ALL_LAYOUTS = (*LAYOUTS, "channels_last", "offset")


@dataclass(frozen=True)
class Variant:
    """One set of inputs of a case. `layout` may also be `scalar`, `empty` or `special`."""

    dtype: torch.dtype
    layout: str = "contiguous"

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.layout}"


@dataclass(frozen=True)
class Op:
    """An operator case; see `op` for the fields."""

    name: str
    fn: Callable[..., Any]
    specs: tuple[Any, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    layouts: tuple[str, ...] = LAYOUTS
    grad: bool = True
    rule: Rule = field(default_factory=Rule)
    expect: str | None = None
    fixed: tuple[int, ...] = ()
    graphs: int = 1
    fullgraph: bool = True
    unbacked: bool = False
    static_only: bool = False
    turn: tuple[int, int] | None = None
    """Which part of the variants, of how many, is taken beside the first one; None: all are."""

    def variants(self) -> list[Variant]:
        """Every dtype contiguous; every other layout in the first dtype."""
        wanted = [Variant(dtype) for dtype in self.dtypes]
        wanted += [Variant(self.dtypes[0], name) for name in self.layouts if name != "contiguous"]
        if "special" in self.layouts and torch.bfloat16 in self.dtypes:
            wanted.append(Variant(torch.bfloat16, "special"))
        if self.turn is None:
            return wanted
        number, parts = self.turn
        return wanted[:1] + wanted[1 + (zlib.crc32(self.name.encode()) + number) % parts :: parts]

    def size_maps(self, dynamic: bool) -> list[Sizes]:
        """The sizes to run with: as written, then, for dynamic shapes, two more sets."""
        dims: set[int] = set()

        def note(spec: T) -> torch.Tensor:
            dims.update(spec.shape)
            return torch.empty(0)

        for spec in self.specs:
            map_specs(spec, note)
        free = dims - {0, 1} - set(self.fixed)
        if not dynamic:
            return [{}]
        return [{}, {d: d + 3 for d in free}, {d: d + 8 for d in free}]

    def build(self, variant: Variant, sizes: Sizes) -> list[Any]:
        """The arguments of one variant, the same on every call."""
        gen = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {variant}".encode()))
        if variant.layout == "special":
            columns = iter(special_columns(len(self.specs), variant.dtype))
            return [map_specs(spec, lambda _: next(columns)) for spec in self.specs]

        def one(spec: T) -> torch.Tensor:
            if variant.layout == "scalar":
                return draw(T((), spec.low, spec.high, spec.dtype), variant.dtype, {}, gen)
            if variant.layout == "empty" and spec.shape:
                first = self._first_dim()
                return draw(spec, variant.dtype, {**sizes, first: 0}, gen)
            value = draw(spec, variant.dtype, sizes, gen)
            return (
                LAYOUT_OF.get(variant.layout, LAYOUT_OF["contiguous"])(value)
                if spec.layout
                else value
            )

        return [map_specs(spec, one) for spec in self.specs]

    def _first_dim(self) -> int:
        found: list[int] = []

        def note(spec: T) -> torch.Tensor:
            found.extend(spec.shape)
            return torch.empty(0)

        for spec in self.specs:
            map_specs(spec, note)
        return found[0]

    def grad_flags(self) -> list[bool]:
        """Per tensor input, in order, whether a gradient is wanted where its dtype allows one."""
        flags: list[bool] = []

        def note(spec: T) -> torch.Tensor:
            flags.append(self.grad and spec.grad)
            return torch.empty(0)

        for spec in self.specs:
            before = len(flags)
            map_specs(spec, note)
            if isinstance(spec, torch.Tensor) and len(flags) == before:
                flags.append(False)
        return flags

    def check(self, backend: BackendUnderTest, dynamic: bool) -> None:
        """Compile and compare; AssertionError names the variant, the output and the element."""
        variants = self.variants()
        try:
            problems = self._run(variants, backend, dynamic)
        except Exception as error:
            if len(variants) == 1:
                raise
            problems = self._run_singly(variants, backend, dynamic)
            if not problems:
                raise AssertionError(
                    f"{self.name}: each variant alone works, all in one graph fail"
                ) from error
        if problems:
            shown = "\n  ".join(problems[:12])
            raise AssertionError(f"{self.name}: {len(problems)} problems\n  {shown}")

    def _run_singly(
        self, variants: Sequence[Variant], backend: BackendUnderTest, dynamic: bool
    ) -> list[str]:
        problems = []
        for variant in variants:
            try:
                problems += self._run([variant], backend, dynamic)
            except Exception as error:
                problems.append(f"[{variant}] {type(error).__name__}: {str(error)[:1500]}")
        return problems

    def _run(
        self, variants: Sequence[Variant], backend: BackendUnderTest, dynamic: bool
    ) -> list[str]:
        backend.start_over()
        problems: list[str] = []
        with (
            dynamo_config.patch(
                capture_dynamic_output_shape_ops=self.unbacked, capture_scalar_outputs=self.unbacked
            ),
            created_on(backend.device),
        ):
            compiled = torch.compile(
                self.all_variants(), backend=backend, dynamic=dynamic, fullgraph=self.fullgraph
            )
            for sizes in self.size_maps(dynamic):
                where = f" {dict(sizes)}" if sizes else ""
                with torch.device("cpu"):
                    groups = [self.build(variant, sizes) for variant in variants]
                groups = _on(backend.device, groups)
                flags = self.grad_flags()
                eager = evaluate(self.all_variants(), groups, flags)
                truth = in_float64(self.all_variants(), groups, flags)
                got = evaluate(compiled, groups, flags)
                for i, variant in enumerate(variants):
                    exact = truth[i] if truth else None
                    found = compare(got[i], eager[i], exact, self.rule)
                    problems += [f"[{variant}{where}] {text}" for text in found]
        problems += self._check_graphs(backend)
        return problems

    def all_variants(self) -> Callable[[list[list[Any]]], list[Any]]:
        """The function, applied to each group of arguments."""
        fn = self.fn

        def run_all(groups: list[list[Any]]) -> list[Any]:
            return [fn(*arguments) for arguments in groups]

        return run_all

    def _check_graphs(self, backend: BackendUnderTest) -> list[str]:
        problems = []
        breaks = self.graphs + (not self.fullgraph and backend.device != "cpu")
        if backend.frames() > breaks:  # after one, the context of the default device is a frame
            problems.append(f"compiled {backend.frames()} times, {breaks} expected")
        if self.expect and backend.is_dicp and not backend.allow_eager:
            counts: dict[str, int] = {}
            limited = 0
            for report in backend.reports():
                for kind, number in report.counts.items():
                    counts[kind] = counts.get(kind, 0) + number
                limits = [n for n in report.nodes if n.reason.startswith(backend.limits)]
                counts["eager"] = counts.get("eager", 0) - len(limits)
                limited += len(limits)
            native = counts.get("compiled", 0) + counts.get("library", 0) + counts.get("view", 0)
            if self.expect == "native" and (counts.get("eager", 0) or not native + limited):
                problems.append(f"expected no eager calls, decisions were {counts}")
            elif self.expect != "native" and not counts.get(self.expect, 0):
                problems.append(f"expected a {self.expect} node, decisions were {counts}")
        return problems


def created_on(device: str) -> AbstractContextManager[Any]:
    """Tensors that are made without naming a device lie on `device`; the host needs no telling."""
    return nullcontext() if device == "cpu" else torch.device(device)


def _on(device: str, groups: list[list[Any]]) -> list[list[Any]]:
    return groups if device == "cpu" else pytree.tree_map(lambda v: copied(v, device), groups)


def op(*arguments: Any, **options: Any) -> Op:
    """One operator case: `op([name], fn, *input_specs, **options)`.

    Input specs: a shape, a `T`, a list of those (for a list of tensors), a tensor, or any other
    value, which is passed on. Options:
      dtypes   the dtypes that inputs without one of their own take; all are in the one graph.
      layouts  memory layouts of the inputs: contiguous, transposed, sliced, expanded,
               channels_last, offset, and the shapes `scalar` (0-dim) and `empty` (first size 0),
               and `special`, vectors of every combination of 0, -0, NaN, infinities and others.
      grad     whether to compare gradients where eager has them (default True).
      exact, elementwise, floor, strides, rtol: see `Rule`.
      expect   what a dicp backend must have done: compiled, library, eager, or native (no eager).
      fixed    sizes that stay as they are in dynamic runs.
      graphs   how many compilations are allowed over all sizes (default 1).
      unbacked capture data-dependent sizes in the graph.  fullgraph=False allows graph breaks.
    """
    name = None
    if isinstance(arguments[0], str):
        name, *arguments = arguments  # type: ignore[assignment]
    fn, *specs = arguments
    if name is None:
        name = str(fn) if isinstance(fn, OpOverload) else fn.__name__
    rule = Rule(
        **{
            key: options.pop(key)
            for key in ("exact", "elementwise", "floor", "strides", "rtol")
            if key in options
        }
    )
    return Op(name, fn, tuple(specs), rule=rule, **options)


def pointwise(*arguments: Any, **options: Any) -> Op:
    """A case whose elements are independent: 0-dim, empty and special inputs too."""
    options.setdefault("elementwise", True)
    options.setdefault("layouts", (*LAYOUTS, "scalar", "empty", "special"))
    return op(*arguments, **options)
