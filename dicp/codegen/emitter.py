"""Emits C++: scopes, values computed once in the outermost scope possible, and indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sympy
import torch

from dicp.codegen.spelling import combine, operator, take
from dicp.codegen.types import (
    STACK_BYTES,
    STORAGE_TYPE,
    VALUE_TYPE,
    conversion,
    has_spelling,
    literal,
    size_text,
    start_value,
    widened,
)
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Checked, Const, Convert, Expr, IndexValue, Masked, Named, Read, Ref
from dicp.loop.ir.index import (
    FloorDiv,
    Index,
    Indirect,
    Mod,
    Size,
    Var,
    contiguous_strides,
    flatten,
    indirect_exprs,
    variable,
)
from dicp.loop.ir.kernel import Kernel, Let, Reduce, Scan, ScratchStore, Stmt, Store
from dicp.loop.ir.ops import INDEX_CHECKS
from dicp.loop.schedule.form import is_distance_below
from dicp.origin import Origin

LINE_BYTES = 64
"""Bytes of a cache line: a non-temporal store of whole lines does not read them first."""


@dataclass
class Scope:
    """A block of code: the loop variables known in it and the values already computed there."""

    variables: frozenset[Var]
    indent: int
    lines: list[str] = field(default_factory=list)
    values: dict[object, str] = field(default_factory=dict)


class Emitter:
    """Emits the code of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.args: dict[Ref, str] = {}
        self.stored = {s.ref.root for s in kernel.stores()}
        self.reductions = {s.name: s for s in kernel.stmts() if isinstance(s, Reduce)}
        self.symbols: dict[sympy.Expr, str] = {}
        """Sizes that are arguments of the kernel, and their names in it."""
        self.scopes: list[Scope] = []
        self.sites: list[tuple[str, Origin | None]] = []
        self.array_names: set[str] = set()
        self.local_names: dict[str, int] = {}
        self.staged: dict[tuple[Ref, Index], str] = {}
        """(tensor, index) -> C++ of the element's copy in a tile that is filled before the loop."""
        self.lined: dict[tuple[Ref, Index], str] = {}
        """(tensor, index) of a non-temporal store -> C++ of the element in its line buffer."""
        self.flagged: set[str] = set()
        """Max and min reductions that find NaNs by a max of magnitude bits: both vectorize."""
        self.kept_at: dict[str, str] = {}
        """Name of an argmax or argmin -> where the current block's buffer keeps the value."""
        self.strip_mined: set[str] = set()
        """Names of reductions and scratch stores that have one lane per element of a cache line."""
        self._uses: dict[Expr, frozenset[Var]] = {}
        self._depth: dict[int, int] = {}
        self._temp = 0
        self._stack_bytes = 0
        self.room_bytes = 0
        """Bytes of workspace that each thread needs."""

    # ---- stack arrays and workspace -------------------------------------------------------------

    def _array(self, dtype: torch.dtype, name: str, count: int, stored: bool = False) -> str:
        """Declares a per-thread array: on the stack, or in the workspace once the stack is full."""
        ctype = (STORAGE_TYPE if stored else VALUE_TYPE)[dtype]
        size = -(-count * max(dtype.itemsize, 1 if stored else 4) // LINE_BYTES) * LINE_BYTES
        if self._stack_bytes + size <= STACK_BYTES:
            self._stack_bytes += size
            return f"{ctype} {name}[{count}];"
        place = f"d_own_room(rooms, room_bytes) + {self.room_bytes}"
        self.room_bytes += size
        return f"{ctype}* const {name} = ({ctype}*)({place});"

    def _allocated(self, ctype: str, name: str, count: str) -> str:
        """Declares memory shared by all threads and freed at the end of the scope."""
        return (
            f"const d_room<{ctype}> room_{name}({count}, status); "
            f"{ctype}* const {name} = room_{name}.at; if (!{name}) return;"
        )

    def workspace(self) -> list[str]:
        """The first lines of a kernel: they allocate its workspace, if it needs one."""
        if not self.room_bytes:
            return []
        return [
            f"  constexpr int64_t room_bytes = {self.room_bytes};",
            "  " + self._allocated("char", "rooms", "room_bytes * d_threads()"),
        ]

    # ---- scopes and statements --------------------------------------------------------------

    def _push(self, variables: Sequence[Var], indent: int) -> Scope:
        known = self.scopes[-1].variables if self.scopes else frozenset()
        scope = Scope(known | frozenset(variables), indent)
        self.scopes.append(scope)
        return scope

    def _pop(self, scope: Scope) -> None:
        assert self.scopes[-1] is scope
        self.scopes.pop()

    def _stmts(self, stmts: Iterable[Stmt], scope: Scope) -> None:
        pad = margin(scope.indent)
        stores: list[str] = []
        for stmt in stmts:
            if isinstance(stmt, Store) and stmt.is_copy:
                assert isinstance(stmt.value, Read)
                source = self._place(stmt.value)
                stores.append(f"{pad}{self._target(stmt)} = {source};")
                continue
            value = self.value(stmt.value)
            if isinstance(stmt, Store):
                stores.append(pad + self._store(stmt, value))
            elif isinstance(stmt, Reduce):
                scope.lines.append(pad + self._combine(stmt, value, self._position(stmt)))
            elif isinstance(stmt, Scan):
                scope.lines.append(pad + self._combine(stmt, value, ""))
                # A scan's value changes at every point: expressions that read it stay in this loop.
                self.local_names[stmt.name] = len(self.scopes) - 1
            elif isinstance(stmt, ScratchStore):
                place = f"saved_{stmt.name}[{self._inner_position()}]"
                if stmt.name in self.strip_mined:
                    place = f"lanes_{stmt.name}[lane]"
                scope.lines.append(f"{pad}{place} = {value};")
            elif isinstance(stmt, Let):
                ctype = VALUE_TYPE[stmt.dtype]
                scope.lines.append(f"{pad}const {ctype} {local(stmt.name)} = {value};")
                self.local_names[stmt.name] = len(self.scopes) - 1
        scope.lines += stores

    def _inner_position(self) -> str:
        sizes = [v.size for v in self.kernel.reduction]
        coords = [variable(v) for v in self.kernel.reduction]
        return self._index(flatten(coords, contiguous_strides(sizes)))

    def _target(self, stmt: Store) -> str:
        place = f"{self._arg(stmt.ref)}[{self._index(stmt.index)}]"
        return self.lined.get((stmt.ref, stmt.index), place)

    def _store(self, stmt: Store, value: str) -> str:
        place = self._target(stmt)
        if stmt.op:
            return self.combining_store(stmt, place, value)
        return self._assignment(stmt, place, value)

    def combining_store(self, stmt: Store, place: str, value: str) -> str:
        """The statement that combines `value` into `place` by `stmt.op`.

        Of a kernel whose threads share the destinations it must be atomic. The dtypes are those of
        `Lowering.atomic_dtypes`.
        """
        old = widened(place, stmt.ref.dtype)
        return self._assignment(stmt, place, combine(stmt.op, old, value))

    def _assignment(self, stmt: Store, place: str, value: str) -> str:
        narrow = {torch.bfloat16: "d_to_bf16", torch.float16: "d_to_f16"}.get(stmt.ref.dtype)
        return f"{place} = {narrow}({value});" if narrow else f"{place} = {value};"

    def _declare(self, stmt: Reduce | Scan) -> str:
        ctype = accumulator_type(stmt)
        text = f"{ctype} {local(stmt.name)} = {start_value(stmt.op, stmt.dtype)};"
        return text + (f" int64_t at_{stmt.name} = 0;" if stmt.finds_position else "")

    def _combine(self, stmt: Reduce | Scan, value: str, position: str) -> str:
        name = local(stmt.name)
        if stmt.name in self.kept_at:
            return f"block_{stmt.name}[{self.kept_at[stmt.name]}] = {value};"
        if stmt.finds_position:
            return take(stmt.op, value, position, name, f"at_{stmt.name}")
        nan = f"nan_{stmt.name}"
        if stmt.name in self.strip_mined:
            name, nan = f"lanes_{stmt.name}[lane]", f"nan_lanes_{stmt.name}[lane]"
        if stmt.name in self.flagged:
            sign = ">" if stmt.op == "max" else "<"
            return (
                f"{name} = {value} {sign} {name} ? {value} : {name}; "
                f"{nan} = d_size_bits({value}) > {nan} ? d_size_bits({value}) : {nan};"
            )
        return f"{name} = {combine(stmt.op, name, value)};"

    def _combine_at(self, stmt: Reduce, value: str, at: str) -> str:
        slot = f"acc_{stmt.name}[{at}]"
        if stmt.finds_position:
            return take(stmt.op, value, self._position(stmt), slot, f"acc_at_{stmt.name}[{at}]")
        return f"{slot} = {combine(stmt.op, slot, value)};"

    def _position(self, stmt: Reduce) -> str:
        return "" if stmt.position is None else f"(int64_t)({self._index(stmt.position)})"

    # ---- expressions ------------------------------------------------------------------------

    def value(self, expr: Expr, guard: str = "", guard_depth: int = 0) -> str:
        """The C++ name or literal of `expr`, computed in the outermost scope possible."""
        if isinstance(expr, Const):
            return literal(expr.value, expr.dtype)
        if isinstance(expr, Masked):
            return self._masked(expr, guard, guard_depth)
        if isinstance(expr, Named):
            return self._named(expr)
        depth = max(self._depth_of(expr), guard_depth if guard else 0)
        key = (expr, guard)
        for scope in self.scopes[: depth + 1]:
            if key in scope.values:
                return scope.values[key]
            if (expr, "") in scope.values:
                return scope.values[expr, ""]
        text = self._text(expr, guard, guard_depth)
        scope = self.scopes[depth]
        same = (expr.op, expr.dtype, text)
        name = scope.values.get(same)
        if name is None:
            self._temp += 1
            name = f"x{self._temp}"
            ctype = VALUE_TYPE[expr.dtype]
            scope.lines.append(f"{margin(scope.indent)}const {ctype} {name} = {text};")
            scope.values[same] = name
        scope.values[key] = name
        return name

    def _named(self, expr: Named) -> str:
        if expr.op == "scratch":
            return f"saved_{expr.name}[{self._inner_position()}]"
        found = self.reductions.get(expr.name)
        result = f"at_{expr.name}" if found and found.finds_position else local(expr.name)
        is_truth = found is not None and found.op in ("any", "all")
        return f"({result} != 0)" if is_truth else result

    def _masked(self, expr: Expr, guard: str, guard_depth: int) -> str:
        test, value = expr.args
        name = self.value(test, guard, guard_depth)
        depth = max(self._depth_of(test), guard_depth if guard else 0)
        if guard:
            both = f"{guard} & {name}"
            scope = self.scopes[depth]
            joined = scope.values.get(("guard", both))
            if joined is None:
                self._temp += 1
                joined = f"x{self._temp}"
                scope.lines.append(f"{margin(scope.indent)}const bool {joined} = {both};")
                scope.values["guard", both] = joined
            name = joined
        return self.value(value, name, depth)

    def _depth_of(self, expr: Expr) -> int:
        """Index of the outermost scope in which `expr` can be computed."""
        needed = self._variables(expr)
        local = self._local_depth(expr)
        for depth, scope in enumerate(self.scopes):
            if depth >= local and needed <= scope.variables:
                return depth
        return len(self.scopes) - 1

    def _local_depth(self, expr: Expr) -> int:
        """Index of the outermost scope that has the row's named values that `expr` reads."""
        depth = 0
        for e in ir.walk(expr):
            if e.op == "scratch":
                return len(self.scopes) - 1
            if isinstance(e, Named):
                depth = max(depth, self.local_names.get(e.name, len(self.scopes) - 1))
        return depth

    def _variables(self, expr: Expr) -> frozenset[Var]:
        found = self._uses.get(expr)
        if found is None:
            parts: set[Var] = set()
            for arg in expr.args:
                parts |= self._variables(arg)
            for index in ir.indices_of(expr):
                parts |= index.variables()
                for inner in indirect_exprs(index):
                    parts |= self._variables(inner)
            found = self._uses[expr] = frozenset(parts)
        return found

    def _text(self, expr: Expr, guard: str, guard_depth: int) -> str:
        if isinstance(expr, Read):
            return self._read(expr, guard, guard_depth)
        if isinstance(expr, IndexValue):
            return f"(int64_t)({self._index(expr.index, guard, guard_depth)})"
        args = [self.value(a, guard, guard_depth) for a in expr.args]
        if expr.op == "exp" and expr.dtype != torch.float64 and self._never_positive(expr.args[0]):
            return f"d_exp_weight({args[0]})"
        if isinstance(expr, Convert):
            return conversion(args[0], expr.args[0].dtype, expr.dtype, ir.rounds(expr))
        if isinstance(expr, Checked) and expr.op in INDEX_CHECKS:
            site = f"status, {self._site(expr)}{guarded(guard)}"
            return f"d_{expr.op}({args[0]}, {args[1]}, {site})"
        site = f"{self._site(expr)}" if isinstance(expr, Checked) else ""
        return operator(expr, args, site)

    def _never_positive(self, expr: Expr) -> bool:
        """Whether `expr` is x - max(x), or is never positive by its form: -|x| or -c * x * x."""
        if expr.op == "neg":
            return expr.args[0].op == "abs"
        if len(expr.args) != 2:
            return False
        first, second = expr.args
        if expr.op == "mul" and isinstance(second, Const) and second.value < 0:
            return first.op == "mul" and first.args[0] is first.args[1]
        if expr.op != "sub" or not isinstance(second, Named):
            return False
        top = self.reductions.get(second.name)
        return isinstance(top, Reduce) and is_distance_below(expr, top)

    def _site(self, expr: Checked) -> int:
        self.sites.append((expr.op, expr.origin))
        return len(self.sites)

    def _read(self, expr: Read, guard: str, guard_depth: int) -> str:
        text = widened(self._place(expr, guard, guard_depth), expr.ref.dtype)
        if guard:
            zero = "false" if expr.dtype == torch.bool else f"({VALUE_TYPE[expr.dtype]})0"
            return f"{guard} ? {text} : {zero}"
        return text

    def _place(self, item: Read, guard: str = "", guard_depth: int = 0) -> str:
        return self.staged.get((item.ref, item.index)) or (
            f"{self._arg(item.ref)}[{self._index(item.index, guard, guard_depth)}]"
        )

    def _arg(self, ref: Ref) -> str:
        if ref not in self.args:
            self.args[ref] = f"a{len(self.args)}"
        return self.args[ref]

    # ---- indices ----------------------------------------------------------------------------

    def _index(self, index: Index, guard: str = "", guard_depth: int = 0) -> str:
        parts = []
        for atom, c in index.terms:
            text = self._atom(atom, guard, guard_depth)
            parts.append(text if c == 1 else f"{self._size(c)} * {text}")
        if index.const != 0 or not parts:
            parts.append(self._size(index.const))
        return " + ".join(parts)

    def _atom(self, atom: Var | FloorDiv | Mod | Indirect, guard: str, guard_depth: int) -> str:
        if isinstance(atom, Var):
            return atom.key
        if isinstance(atom, Indirect):
            return self.value(atom.expr, guard, guard_depth)
        sign = "/" if isinstance(atom, FloorDiv) else "%"
        inner = self._index(atom.value, guard, guard_depth)
        return f"(({inner}) {sign} {self._size(atom.divisor)})"

    def _size(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size) if size >= 0 else f"({size})"
        if not has_spelling(size):  # the host computes it and passes it as an argument
            return self._handed_over(size)
        renamed = {
            symbol: sympy.Symbol(self._handed_over(symbol), **symbol.assumptions0)
            for symbol in sorted(size.free_symbols, key=str)
        }
        return f"({size_text(size.xreplace(renamed))})"

    def _handed_over(self, size: sympy.Expr) -> str:
        return self.symbols.setdefault(size, f"n{len(self.symbols)}")


def margin(depth: int) -> str:
    return "  " * depth


def local(name: str) -> str:
    return f"v_{name}"


def guarded(guard: str) -> str:
    return f", {guard}" if guard else ""


def nan_bits(stmt: Reduce | Scan) -> str:
    """The unsigned type that holds the magnitude bits by which a max or min finds NaNs."""
    return "uint64_t" if VALUE_TYPE[stmt.dtype] == "double" else "uint32_t"


def accumulator_type(stmt: Reduce | Scan) -> str:
    return "int" if stmt.op in ("any", "all") else VALUE_TYPE[stmt.dtype]
