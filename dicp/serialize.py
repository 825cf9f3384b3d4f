"""JSON serialization of symbolic sizes, constant tensors, arguments and operators (by name)."""

from __future__ import annotations

import ast
import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from dicp.torch_private import OpOverload, disable_current_modes, python_size, schema_of

MAX_CONSTANT_BYTES = 1 << 22
"""A larger constant is not serialized."""


def encode_size(size: Any) -> int | str:
    """An integer, or a sympy expression as Python text."""
    return size if isinstance(size, int) else python_size(size)


def bound_sizes(sources: Iterable[Sequence[int]], inputs: Sequence[Any]) -> tuple[int, ...]:
    """The values of symbols, each from its source: (input,) or (input, axis of that tensor)."""
    return tuple(inputs[s[0]] if len(s) == 1 else inputs[s[0]].shape[s[1]] for s in sources)


def encode_constant(tensor: torch.Tensor) -> dict[str, Any] | None:
    """A small dense constant, serialized; None for one that cannot be."""
    strided = tensor.layout == torch.strided and not tensor.is_quantized
    if not strided or tensor.numel() * tensor.element_size() > MAX_CONSTANT_BYTES:
        return None
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "data": base64.b64encode(bytes_of(tensor)).decode(),
        "device": str(tensor.device),
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a strided tensor, row-major; conjugates and negatives as numbers."""
    with disable_current_modes():
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = dense.as_strided((dense.numel(),), (1,))  # a single element may have any stride
        return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def decode_constant(plain: Mapping[str, Any]) -> torch.Tensor:
    """The constant, with its numbers even while PyTorch traces."""
    dtype = _named(plain["dtype"], torch.dtype)
    data = bytearray(base64.b64decode(plain["data"]))
    with disable_current_modes():
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(plain["shape"]).to(plain["device"])
        return restrided(tensor, plain["shape"], plain["strides"])


def restrided(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A copy with these strides; along a stride of 0, all elements are copies of the first."""
    sizes = [1 if t == 0 else s for s, t in zip(shape, strides, strict=True)]
    for dim, (size, whole) in enumerate(zip(sizes, shape, strict=True)):
        if size != whole and whole:
            tensor = tensor.narrow(dim, 0, 1)
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    copy = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor).expand(shape)


def _named(name: str, kinds: type | tuple[type, ...]) -> Any:
    """A member of torch, of these kinds and no other. Raises ValueError."""
    value = getattr(torch, name, None)
    if not isinstance(value, kinds):
        raise ValueError(f"torch.{name} is no argument of a stored call")
    return value


_OPERATIONS = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Load, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv,
    ast.Mod, ast.USub, ast.Not, ast.Div, ast.IfExp, ast.Compare, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
    ast.Eq, ast.NotEq, ast.BoolOp, ast.And, ast.Or,
    ast.BitAnd, ast.BitOr, ast.BitXor, ast.RShift,
)  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": max, "min": min, "abs": abs, "int": int, "float": float, "round": round,
    "math.floor": math.floor, "math.ceil": math.ceil, "math.trunc": int,
    "torch.sym_float": float, "torch.sym_int": int, "torch._sym_sqrt": math.sqrt,
    "math.acos": math.acos, "math.asin": math.asin, "math.atan": math.atan, "math.cos": math.cos,
    "math.cosh": math.cosh, "math.log2": math.log2, "math.sin": math.sin, "math.sinh": math.sinh,
    "math.sqrt": math.sqrt, "math.tan": math.tan, "math.tanh": math.tanh,
}  # fmt: skip
"""Functions that a size expression may call, by their name in it."""
_MAX_BITS = 4096  # of a power


def _power(base: Any, exponent: Any) -> Any:
    """`base ** exponent`. Raises OverflowError for an integer that no size can be."""
    if isinstance(base, int) and isinstance(exponent, int):
        if base.bit_length() * exponent > _MAX_BITS:
            raise OverflowError(f"a power of more than {_MAX_BITS} bits")
    return base**exponent


def _shifted(number: int, bits: int) -> int:
    return number * _power(2, bits)


_BOUNDED = {ast.Pow: ("**", _power), ast.LShift: ("<<", _shifted)}
"""Operators whose results may be much longer than their operands, as functions with a bound."""
_SYMBOL = re.compile(r"[A-Za-z]\w*")


class _Restricted(ast.NodeTransformer):
    """Restricts a size expression to what may be evaluated; functions become keys of `_FUNCTIONS`.

    Raises ValueError for anything but numbers, symbols, arithmetic and calls of these functions.
    """

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.Call(func=function, args=args, keywords=[]):
                name = ast.unparse(function)
                if name in _FUNCTIONS:
                    called = ast.Name(name, ast.Load())
                    numbers: list[Any] = [self.visit(argument) for argument in args]
                    return ast.copy_location(ast.Call(called, numbers, []), node)
            case ast.BinOp(left=left, op=ast.Pow() | ast.LShift() as operator, right=right):
                called = ast.Name(_BOUNDED[type(operator)][0], ast.Load())
                operands: list[Any] = [self.visit(left), self.visit(right)]
                return ast.copy_location(ast.Call(called, operands, []), node)
            case ast.Name(id=name):
                if _SYMBOL.fullmatch(name) and name not in _FUNCTIONS:
                    return node
            case ast.Constant(value=bool() | int() | float()):
                return node
            case _ if isinstance(node, _OPERATIONS):
                return self.generic_visit(node)
        raise ValueError(f"{ast.unparse(node)!r} is no part of a size expression")


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    try:
        tree: Any = _Restricted().visit(ast.parse(text, mode="eval"))
        code: CodeType = compile(ast.fix_missing_locations(tree), "<size>", "eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:80]!r} is no size expression: {error}") from None
    return code


def evaluate(number: Any, symbols: Mapping[str, int]) -> Any:
    """The value of an encoded size, or of an encoded number that need not be an integer.

    Raises ValueError for text that is not a size expression, NameError for an unknown symbol,
    ArithmeticError for a division by zero and a number without bounds.
    """
    if isinstance(number, (int, float)):
        return number
    scope = {"__builtins__": {}, **_FUNCTIONS, **dict(_BOUNDED.values())}
    return eval(_compiled(number), scope, dict(symbols))


def evaluate_size(size: int | str, symbols: Mapping[str, int]) -> int:
    """The value of an encoded size."""
    return size if isinstance(size, int) else int(evaluate(size, symbols))


def encode_argument(
    value: Any, leaf: Callable[[Any], Any], keep: Callable[[Any], dict[str, int]]
) -> Any:
    """An argument of a call, serialized: `leaf` encodes tensors and sizes and returns None for
    others, `keep` stores objects that cannot be serialized."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if (plain := leaf(value)) is not None:
        return plain
    if isinstance(value, list):
        return [encode_argument(v, leaf, keep) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode_argument(v, leaf, keep) for v in value]}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return keep(value)


def decode_argument(
    plain: Any, leaf: Callable[[Any], Any], size: Callable[[Any], Any], objects: Sequence[Any]
) -> Any:
    """The argument that was serialized; `leaf(slot)` gives tensors, `size(text)` numbers."""
    if isinstance(plain, list):
        return [decode_argument(item, leaf, size, objects) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    match plain:
        case {"ref": slot}:
            return leaf(slot)
        case {"size": text}:
            return size(text)
        case {"tuple": items}:
            return tuple(decode_argument(item, leaf, size, objects) for item in items)
        case {"torch": name}:
            return _named(name, (torch.dtype, torch.layout, torch.memory_format))
        case {"device": name}:
            return torch.device(name)
    return objects[plain["object"]]


def encode_operator(op: Any, keep: Callable[[Any], dict[str, int]]) -> Any:
    """An overload as `namespace::name.overload`; `keep` stores any other callable."""
    if isinstance(op, OpOverload):
        schema = schema_of(op)
        return f"{schema.name}.{schema.overload_name}"
    return keep(op)


def resolve_operator(name: str) -> Any:
    """The ATen overload called `namespace::name.overload`."""
    qualified, overload = name.rsplit(".", 1)
    namespace, base = qualified.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def sizes_are_promised(call: Any) -> bool:
    """Whether result sizes depend on data, so that known ones come from `torch._check`.

    `call` is an operator's name, or what stands for a subgraph.
    """
    tags = resolve_operator(call).tags if isinstance(call, str) else ()
    return torch.Tag.dynamic_output_shape in tags


_BOUND = {
    "aten::convolution": torch.convolution, "aten::mm": torch.mm, "aten::bmm": torch.bmm,
    "aten::addmm": torch.addmm, "aten::baddbmm": torch.baddbmm,
}  # fmt: skip


def callable_of(op: Any) -> Any:
    """The cheapest callable for `op`: an overload looks its kernel up by name at every call, which
    takes 4 microseconds longer than the function that PyTorch binds to Python."""
    schema = schema_of(op)
    if schema is None or schema.overload_name not in ("", "out"):
        return op
    return _BOUND.get(schema.name, op)


def flat(result: Any) -> list[Any]:
    """The results of a call, nested tuples taken apart."""
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in flat(item)]
    return [result]
