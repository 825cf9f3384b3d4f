"""OpDtypeCast: operators in another dtype, their results cast back."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dicp.errors import ToolWarning
from dicp.op_tools import trees
from dicp.op_tools.frame import Call, Feature, Proceed
from dicp.op_tools.names import RESHAPES_IN_PLACE, is_constructor, short_name
from dicp.op_tools.overwriting import StandIns
from dicp.op_tools.reference import (
    Rules,
    cast_rules,
    expected,
    parse_rules,
    without_autocast,
)
from dicp.op_tools.tables import table

VARIABLE = "OP_DTYPE_CAST_DICT"
DEFAULT = "torch.float16->torch.float32,torch.bfloat16->torch.float32"
_VIEWS_AND_CASTS = re.compile(
    r"(view|view_as|reshape|reshape_as|transpose|permute|movedim|moveaxis|swapaxes|swapdims|t|"
    r"expand|expand_as|squeeze|unsqueeze|flatten|unflatten|ravel|narrow|select|chunk|split|"
    r"hsplit|vsplit|dsplit|split_with_sizes|tensor_split|unsafe_(split|chunk|split_with_sizes)|"
    r"unbind|broadcast_to|broadcast_tensors|real|imag|conj|resolve_conj|resolve_neg|slice|"
    r"atleast_[123]d|meshgrid|view_as_real|view_as_complex|positive|detach|to|type_as|float|half|"
    r"double|bfloat16|int|long|short|cfloat|cdouble|chalf|bool|char|byte|cpu|contiguous|clone|"
    r"as_strided|diagonal|unfold|adjoint|__getitem__|item|tolist|numpy|__array__|copy_|pin_memory)"
)
_NARROWER = {torch.float64: torch.float32, torch.float32: torch.float16}
_SPOKEN = {torch.float64: "double", torch.float32: "float", torch.float16: "half"}


def keeps_dtype(name: str) -> bool:
    """Whether an operator only shows or converts its input, so that a cast has no meaning."""
    short = short_name(name)
    known = short in RESHAPES_IN_PLACE or is_constructor(name)
    return known or _VIEWS_AND_CASTS.fullmatch(short) is not None


class OpDtypeCast(Feature):
    """Runs operators on inputs cast by rules `A->B,...`, given or in OP_DTYPE_CAST_DICT."""

    feature = "cast_dtype"
    hook = "OpDtypeCastHook"
    variable = "DTYPE_CAST"
    changes_results = True

    def __init__(
        self, ops: Sequence[str] | None = None, *, rules: str | None = None, **options: Any
    ) -> None:
        super().__init__(ops, **options)
        self.rules = None if rules is None else parse_rules("rules", rules)
        self._lacking: dict[tuple[str, torch.dtype], torch.dtype] = {}

    def skips(self, name: str) -> bool:
        return keeps_dtype(name) or "torch.distributed." in name

    def around(self, call: Call, proceed: Proceed) -> Any:
        rules = self.rules if self.rules is not None else cast_rules(VARIABLE, DEFAULT)
        rows: list[tuple[object, ...]] = []
        back: dict[torch.dtype, torch.dtype] = {}
        casts: dict[int, torch.Tensor] = {}
        given = list(trees.tensors((call.args, call.kwargs)))
        for place, tensor in enumerate(given):
            target = rules.get(tensor.dtype)
            if target is None:
                continue
            casts[id(tensor)] = cast = self._cast(tensor, target)
            back.setdefault(cast.dtype, tensor.dtype)
            rows.append((call.name, f"input[{place}]", f"{tensor.dtype} -> {cast.dtype}",
                         _shown(rules)))  # fmt: skip
        if not casts:
            return proceed(call)
        original = call.args, call.kwargs
        promised = list(trees.tensors(expected(call.operator, *original)))
        call.args, call.kwargs = trees.map_tensors(original, lambda t: casts.get(id(t), t))
        if "dtype" in call.kwargs:
            call.kwargs["dtype"] = rules.get(call.kwargs["dtype"], call.kwargs["dtype"])
        stand_ins = StandIns.around({id(t): (t, casts.get(id(t), t)) for t in given})
        with without_autocast(call.args, call.kwargs):
            result = proceed(call)
        call.args, call.kwargs = original
        originals = stand_ins.write_back(call.name, *original)
        result = self._back(call.name, result, originals, promised, back, rows, rules)
        self._print(call, rows)
        return result

    def _back(
        self, name: str, result: Any, originals: Mapping[int, torch.Tensor],
        promised: Sequence[torch.Tensor], back: Rules, rows: list[tuple[object, ...]], rules: Rules,
    ) -> Any:  # fmt: skip
        """The results in the dtypes that the operator promises for its own inputs."""
        places = iter(range(len(list(trees.tensors(result)))))

        def leaf(value: torch.Tensor) -> torch.Tensor:
            place = next(places)
            if id(value) in originals:
                return originals[id(value)]
            target = back.get(value.dtype)
            if place < len(promised):  # inputs of several dtypes promote
                target = promised[place].dtype
            if target in (None, value.dtype):
                return value
            rows.append((name, f"output[{place}]", f"{value.dtype} -> {target}", _shown(rules)))
            return value.to(target)

        return trees.map_tensors(result, leaf)

    def _cast(self, tensor: torch.Tensor, target: torch.dtype) -> torch.Tensor:
        """The tensor in `target`, or in the next narrower dtype that its device has."""
        target = self._lacking.get((tensor.device.type, target), target)
        try:
            return tensor.to(target)
        except (RuntimeError, TypeError):
            narrower = _NARROWER.get(target)
            if narrower is None:
                raise
            self._lacking[tensor.device.type, target] = narrower
            text = (
                f"Warning: Device do not support {_SPOKEN[target]} dtype now, "
                f"dtype cast repalce with {_SPOKEN[narrower]}."
            )
            self.say(text)
            warnings.warn(ToolWarning(text), stacklevel=2)
            return self._cast(tensor, narrower)

    def _print(self, call: Call, rows: list[tuple[object, ...]]) -> None:
        if self.style == "line":
            for row in rows:
                self.say(f"{self.hook}: {row[0]} {row[1]} {row[2]}")
            return
        self.say(call.heading())
        self.say(table(("name", "target", "action", "config"), rows))


def _shown(rules: Rules) -> str:
    return "{" + ", ".join(f"{a}: {b}" for a, b in rules.items()) + "}"
