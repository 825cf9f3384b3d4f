"""Calls of operators as entries of a conformance case file: shapes, strides, dtypes and scalars.

`dicp/conformance/suite/files.py` shows the form. Tensors are described; those of a few integers,
which are often sizes, labels or offsets that have to fit together, are stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HEAD = "# Recorded from a program: tensors are described, and only a few integers are stored."
STORED_INTEGERS = 48
NAMED = {
    "dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format,
}  # fmt: skip
"""Values of PyTorch that are attributes of its module."""
OF_FORWARD: Mapping[str, Mapping[str, Any]] = {
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default": {
        "call": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
        "given": ["query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"],
        "results": {"out": 0, "logsumexp": 1},
    },
}
"""Operators whose arguments are results of another call, as `saved` of an entry says it. Kernels
rely on that: the score of a row's only key has the gradient 0 if the results are the forward's."""
_PER_CASE = ("shape", "strides", "gen", "value")


class NotStorableError(TypeError):
    """A value that case files and reference data have no form for."""


def plain_form(value: Any) -> Any:
    """A value without tensors as JSON. Raises NotStorableError."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [plain_form(value.real), plain_form(value.imag)]}
    if isinstance(value, list):
        return [plain_form(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [plain_form(part) for part in value]}
    if isinstance(value, slice):
        return {"slice": [plain_form(v) for v in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.device):
        return {"device": value.type}
    for kind, cls in NAMED.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    raise NotStorableError(f"a value of type {type(value).__name__}")


def toml(value: Any) -> str:
    """A value of numbers, texts, lists and dictionaries as TOML has it on one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if value is None:
        return "{ none = true }"
    return repr(value) if isinstance(value, float) else json.dumps(value)


@dataclass
class CaseList:
    """Distinct calls, in the order in which they came first."""

    _groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def add(
        self, name: str, call: str, args: Sequence[Any], kwargs: Mapping[str, Any],
        inplace: bool = False,
    ) -> None:  # fmt: skip
        """Describe a call of the operator `call`, a dotted name. Raises NotStorableError."""
        named = {**{str(k): value for k, value in enumerate(args)}, **kwargs}
        saved = None if args else _saved(call, kwargs)
        described = {
            parameter: _described(value)
            for parameter, value in named.items()
            if saved is None or parameter not in saved["results"]
        }
        text = json.dumps([call, inplace, described])
        if text in self._seen:
            return
        self._seen.add(text)
        alike = {
            parameter: [{k: v for k, v in form.items() if k not in _PER_CASE}, "value" in form]
            if "tensor" in form else "parameter"
            for parameter, form in described.items()
        }  # fmt: skip
        group = json.dumps([name, call, inplace, saved, alike])
        self._groups.setdefault(group, []).append(described)

    def entries(self) -> list[dict[str, Any]]:
        """An entry for each operator, and for each combination of dtypes that it is called with."""
        found = []
        for group, cases in self._groups.items():
            name, call, inplace, saved, _ = json.loads(group)
            found.append(_entry(name, call, inplace, saved, cases))
        return found


def case_file(cases: CaseList) -> str:
    """The text of a case file, TOML."""
    parts = [HEAD]
    for entry in cases.entries():
        parts += ["", "[[case]]"]
        fields = {key: v for key, v in entry.items() if key not in ("tensors", "parameters")}
        parts += [f"{key} = {toml(v)}" for key, v in fields.items()]
        for parameter, fields in entry.get("tensors", {}).items():
            parts.append(f"[case.tensors.{parameter}]")
            parts += [f"{key} = {toml(v)}" for key, v in fields.items()]
        if "parameters" in entry:
            parts.append("[case.parameters]")
            parts += [f"{key} = {toml(v)}" for key, v in entry["parameters"].items()]
    return "\n".join(parts) + "\n"


def _saved(call: str, names: Collection[str]) -> dict[str, Any] | None:
    """Which arguments of a call by keywords are results of another call, and of what arguments."""
    saved = OF_FORWARD.get(call)
    if saved is None or not set(saved["results"]) <= set(names):
        return None
    return {**saved, "given": [name for name in saved["given"] if name in names]}


def _described(value: Any) -> dict[str, Any]:
    """A tensor's fields, those of tensors in a list, or {"plain": ...}."""
    if isinstance(value, Tensor):
        return {"tensor": True, **_tensor(value)}
    if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
        members = [None if v is None else _tensor(v, stored=0) for v in value]
        given = [member for member in members if member is not None]
        if len({member["dtype"] for member in given}) > 1:
            raise NotStorableError("a list of tensors of several dtypes")
        first = given[0]
        return {
            "tensor": True, "stack": True, "dtype": first["dtype"],
            "shape": [member and member["shape"] for member in members],
            "strides": [member and member["strides"] for member in members],
            "gen": _common_generator(given),
        }  # fmt: skip
    return {"plain": plain_form(value)}


def _tensor(value: Tensor, stored: int = STORED_INTEGERS) -> dict[str, Any]:
    """A tensor's fields: the values of up to `stored` integers, else what draws them."""
    if value.layout != torch.strided or value.is_quantized or type(value) not in (
        Tensor, torch.nn.Parameter,
    ):  # fmt: skip
        raise NotStorableError(f"a tensor of layout {value.layout}, type {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")
    fields: dict[str, Any] = {"dtype": dtype, "shape": list(value.shape)}
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if whole and 0 < value.numel() <= stored and value.is_contiguous():
        return {**fields, "value": value.tolist()}
    fields["strides"] = list(value.stride())
    fields["gen"] = _generator(value)
    if value.requires_grad:
        fields["grad"] = True
    return fields


def _generator(value: Tensor) -> str:
    """The generator whose values are of the kind that a tensor has."""
    if not value.numel() or value.is_complex():
        return "randn"
    least, most = float(value.min()), float(value.max())
    if value.dtype == torch.bool:
        return "mask" if least < most else "ones" if least else "zeros"
    if not value.is_floating_point():
        return f"randint({int(least)}, {int(most) + 1})"
    if 0 <= least and most <= 1:
        return "uniform(0, 1)"
    return "positive" if least > 0 else "randn"


def _common_generator(members: Sequence[Mapping[str, Any]]) -> str:
    """One generator for the tensors of a list."""
    kinds = {member["gen"] for member in members}
    if len(kinds) == 1:
        return str(kinds.pop())
    bounds = [kind.removeprefix("randint(").strip(")").split(", ") for kind in kinds]
    if all(len(pair) == 2 and pair[0].lstrip("-").isdecimal() for pair in bounds):
        least, most = min(int(a) for a, _ in bounds), max(int(b) for _, b in bounds)
        return f"randint({least}, {most})"
    return "randn" if members[0]["dtype"] != "bool" else "mask"


def _entry(
    name: str, call: str, inplace: bool, saved: Mapping[str, Any] | None,
    cases: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """An entry whose lists zip: one value stands for all cases that have the same."""
    tensors, parameters = {}, {}
    for parameter, first in cases[0].items():
        forms = [case[parameter] for case in cases]
        if "tensor" not in first:
            parameters[parameter] = _zipped([form["plain"] for form in forms])
            continue
        tensors[parameter] = _tensor_fields(forms)
    dtypes = [fields["dtype"] for fields in tensors.values()]
    floats = [dtype for dtype in dtypes if getattr(torch, dtype).is_floating_point]
    main = next(iter([*floats, *dtypes]), "float32")
    for fields in tensors.values():
        if fields["dtype"] == main:
            del fields["dtype"]
    entry = {
        "name": name, "call": call, "dtypes": [main], "inplace": inplace, "saved": saved,
        "tensors": tensors, "parameters": parameters,
    }  # fmt: skip
    return {key: value for key, value in entry.items() if value}


def _tensor_fields(forms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    fields = {k: v for k, v in forms[0].items() if k not in (*_PER_CASE, "tensor")}
    if "value" in forms[0]:
        return fields | {"value": _zipped([form["value"] for form in forms])}
    fields["shape"] = _zipped([form["shape"] for form in forms])
    if any(_gapped(form) for form in forms):
        fields["strides"] = _zipped([form["strides"] for form in forms])
    generators = _zipped([form["gen"] for form in forms])
    if generators != ["randn"]:
        fields["gen"] = generators[0] if len(generators) == 1 else generators
    return fields


def _gapped(form: Mapping[str, Any]) -> bool:
    """Whether a tensor, or one of a list, is not contiguous."""
    pairs: Iterator[tuple[Any, Any]] = iter([(form["shape"], form["strides"])])
    if form.get("stack"):
        pairs = zip(form["shape"], form["strides"], strict=True)
    return any(
        shape is not None and list(torch.empty(shape, device="meta").stride()) != strides
        for shape, strides in pairs
    )


def _zipped(values: list[Any]) -> list[Any]:
    return values[:1] if all(value == values[0] for value in values) else values
